"""Adopting the testbed in an existing PyTorch loop: one line after the optimizer is made."""

from __future__ import annotations

import atexit
import os
import sys
from functools import partial
from pathlib import Path

import msgspec
import torch

from testbed.backends.protocol import Backend, Group
from testbed.base.axes import AXES, BACKENDS, SCHEDULERS, WORKLOADS
from testbed.base.config import make_config
from testbed.base.errors import TestbedError, UnknownName, UsageError
from testbed.base.files import load_trace
from testbed.base.plan import Plan
from testbed.base.types import BSP
from testbed.control.protocol import Control, decided_by_first, describe_self
from testbed.launch.join import assign_role, join, open_backend, who_am_i
from testbed.launch.plan_options import group_for, parts_of
from testbed.prediction.nominal import link_among, read_link
from testbed.scheduling.protocol import make_plan, needs_profile
from testbed.training.compressed.spec import compression_of, refuse_ratios
from testbed.training.exchange.setup import AGREE_S, Replan, replanner
from testbed.training.planned import PlannedModel
from testbed.training.replica import strategy_of
from testbed.training.session import Session

LEAVE_S = 3600.0
ENDED = "ended its loop"  # topic: member, in words, steps that it took part in

Measured = tuple[str | Path, str | Path]
"""File of the trace and file or nominal numbers of the link that a plan is made from."""


def distribute(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    backend: str = BACKENDS.default,
    *,
    seed: int = 1,
    trace: str | Path | None = None,
    link: str | Path | None = None,
    deadline_s: float = 10.0,
    patience_s: float = 600.0,
    check_finite: bool = True,
    interface: str | None = None,
    **parts: str,
) -> Session:
    """Make an ordinary training loop data-parallel; start the script under mpirun or torchrun.

    Gradients leave during `loss.backward()`, when the scheduler says so; `optimizer.step()` waits
    until they are means over the workers. Rank 0's parameters and buffers replace those of the
    others at once. The rest of the loop stays as it is; give each rank its own samples
    (`session.backend.rank` of `session.backend.size`). When the process ends the session ends with
    it, or call `close()`. Without a launcher the process trains alone, and says so on stderr.

    With a scheduler that crosses the iteration (`dear`, `pace`, `bytescheduler`, `p3`)
    `optimizer.step()` does not wait: each layer is updated just before it is called again. A
    `state_dict()` sees to what is pending by itself; whoever reads parameters without calling their
    layers calls `session.flush()` before. `zero_grad()` belongs into every step: where it is
    forgotten, such a scheduler has cleared the gradients, and any other adds to the last mean.

    With a `memory=` that decides about activations (`checkpoint`, `offload`, `laysa`, ...) the
    model's forward pass is run once more, on tensors without values, when inputs of new shapes are
    first seen in training, and a plan is made from that (see `training.planned`). What the script
    computes outside of `model(...)`, as a loss, is not covered: its activations stay. Call the
    model itself, not its layers alone. With `torch.compile` it is refused. A copy of the model
    (`copy.deepcopy`, `AveragedModel`, `torch.save`) computes without a plan.

    Unfreeze parameters before this call, and give `optimizer.step()` no closure: both are refused,
    since such gradients would not be exchanged.

    Args:
        model: built alike on all ranks.
        optimizer: of the model's parameters.
        backend: `name[:key=value,...]`, as on the command line.
        seed: of what a compressor draws.
        trace: file of `testbed profile -o`, for schedulers that plan from times (`mg-wfbp`,
            `optimal`, `auto`, ...): a script's own loop cannot be profiled from here. Rank 0 reads.
        link: file of `testbed comm --fit -o`, or nominal numbers as `rate=10gbit,latency=50us`;
            goes with the trace.
        deadline_s: a lost rank raises `RankLost` on all others within this time.
        patience_s: how long a rank that is alive may take between two steps (evaluating, saving)
            before the others give up on it. A rank that has ended its loop is not waited for: where
            another one begins a further step, all end with `RankLost`, which says so.
        check_finite: raise `NonFiniteGradient` where a mean holds NaN or infinity; False beside a
            gradient scaler, which looks for them itself and skips the step.
        interface: network interface or address to use; None = decided here.
        parts: `scheduler=`, `compressor=`, `memory=`: `name[:key=value,...]`, as on the command
            line. What a compressor keeps from step to step is `session.state_dict()`, to be saved
            by each rank for itself; what servers keep that encode means again (`zmq-ps` under
            signs and few bits, unless `repack=0`) is not in it.

    Returns:
        The session: `synchronize()` before clipping and before a gradient scaler's `unscale_()` or
        `step()`, `accumulating()` for gradient accumulation.

    Raises:
        UnknownName, UsageError, Unavailable: a part cannot be used.
        UsageError: the backend needs server processes of its own, which a script cannot become;
            the scheduler needs a trace and a link; or they are of another model.
        Disagreement: ranks have other parameters or plans.
        RunFailed: rank 0 was not reached in time.
        RankLost, DeadlineExceeded: a rank did not join, was lost or did not come.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> session = distribute(model, optimizer, backend="gloo", scheduler="dear")
        >>> model(torch.ones(1, 4)).sum().backward(); optimizer.step()
        >>> session.close()
    """
    axes = [axis for axis in AXES if axis is not WORKLOADS]
    for name in parts:
        if name not in {axis.what for axis in axes}:
            raise UnknownName("argument of distribute", name, [axis.what for axis in axes])
    config = make_config({"backend": backend, "seed": seed, **parts})
    scheduler = config.scheduler
    chosen = parts_of(config, axes)
    asked = chosen[BACKENDS.what]
    compression = compression_of(config.compressor, seed)
    strategy = strategy_of(config.memory, config.compressor)
    if asked.facts.num_servers:
        raise UsageError(
            f"backend {backend!r} needs dedicated server processes, and this script is a worker on "
            "every rank; use servers=colocated, or `testbed run --workload my_model.py:build`"
        )
    measured = _measured(scheduler, trace, link)
    role = assign_role(who_am_i(), asked, None)
    if role.identity.launcher == "alone":
        _begin_alone()
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    group = join(role, interface=interface, deadline_s=deadline_s, device=str(device))
    opened: Backend | None = None
    try:
        plan, replan = _plan(scheduler, config.backend, model, measured, group)
        if compression is None:
            refuse_ratios(plan)
        opened = open_backend(role, group_for(plan, group))
        if strategy.prepare is not None:
            strategy.prepare(model, optimizer)
        session = Session(
            *(model, optimizer, opened, group.control),
            plan=plan,
            replan=replan,
            patience_s=patience_s,
            check_finite=check_finite,
            compression=compression,
            strategy=strategy,
        )
        planned = None
        if strategy.choose is not None:
            planned = PlannedModel(model, optimizer, session, group.control, strategy)
    except BaseException as error:  # the others must hear of it, whatever it is
        group.control.report_failure(f"it failed to start with {type(error).__name__}: {error}")
        if opened is not None:
            opened.close()
        group.control.close()
        raise

    if opened.capabilities.consistency == BSP:  # every step needs every rank
        group.control.listen(
            ENDED,
            lambda told: session.step_state.hear_of_end(
                *msgspec.msgpack.decode(told, type=tuple[int, str, int])
            ),
        )

    end = partial(_end, session, group.control)

    def leave() -> None:
        if planned is not None:
            planned.close()
        # A rank that is done early keeps its colocated server up for the others.
        group.control.state = "waiting for the other ranks to finish"
        told = group.rank, describe_self("rank", group.rank), session.step_state.num_begun
        group.control.announce(
            ENDED, msgspec.msgpack.encode(told), members=group.size, others_alone=True
        )
        group.control.all_gather("leave", b"", LEAVE_S, members=group.size)
        opened.close(group.deadline_s)
        group.control.close()
        atexit.unregister(end)  # what fails from now on is the script's own

    session.on_close(leave)
    atexit.register(end)
    return session


def _begin_alone() -> None:
    sys.stderr.write(
        "testbed: found no launcher (mpirun, torchrun, srun): this process trains alone and "
        "exchanges nothing\n"
    )
    # Open MPI without a launcher leaves its shared memory behind, 16 MiB for each process.
    os.environ.setdefault("OMPI_MCA_btl", "^sm")


def _measured(scheduler: str, trace: str | Path | None, link: str | Path | None) -> Measured | None:
    """Where the times are that the plan is made from; None = it is made from sizes alone."""
    if trace is not None and link is not None:
        return trace, link
    how = (
        "record them with `testbed profile --workload my_model.py:build -o trace.json` and "
        "`testbed comm --fit --backend B --workers N -o link.json`"
    )
    if trace is not None or link is not None:
        given, lacking = ("trace", "link") if link is None else ("link", "trace")
        raise UsageError(f"{given}= was given without {lacking}=; expected both or neither; {how}")
    if needs_profile(scheduler):
        without = ", ".join(SCHEDULERS.which(lambda facts: not facts.needs_profile))
        raise UsageError(
            f"scheduler {scheduler!r} plans from times and was given none; expected trace= and "
            f"link=; {how}, or use a scheduler without ({without})"
        )
    return None


def _plan(
    scheduler: str, backend: str, model: torch.nn.Module, measured: Measured | None, group: Group
) -> tuple[Plan, Replan | None]:
    """The first step's plan, and how to make it anew from the order of that step's gradients."""
    if measured is None:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        replan = replanner(scheduler, named, backend)
        return replan([name for name, _ in reversed(named)]), replan
    trace, link = measured

    def decide() -> bytes:
        among = link_among(read_link(link, backend, group.size), group.size, backend)
        return msgspec.json.encode(make_plan(scheduler, load_trace(trace), among))

    shared = decided_by_first(group.control, "plan", decide, AGREE_S, group.size)
    return msgspec.json.decode(shared, type=Plan), None


def _end(session: Session, control: Control) -> None:
    """At interpreter exit: leave in good order, or tell the others why not."""
    error = getattr(sys, "last_value", None)
    if error is None:
        try:
            return session.close()
        except TestbedError as failure:  # of a rank that waits for others to finish
            sys.stderr.write(f"testbed: {type(failure).__name__}: {failure}\n")
            error = failure
    control.report_failure(f"it failed while {control.state} with {type(error).__name__}: {error}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)  # a library that waits for lost ranks cannot be finalised
