"""Adopting the testbed in an existing PyTorch loop: one line after the optimizer is made."""

from __future__ import annotations

import atexit
import os
import sys

import torch

from testbed.control.protocol import Control
from testbed.errors import UsageError
from testbed.launch.join import assign_role, join, open_backend, resolve_backend, who_am_i
from testbed.training.session import Session

LEAVE_S = 3600.0


def distribute(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    backend: str = "mpi-ring",
    *,
    deadline_s: float = 10.0,
    patience_s: float = 600.0,
    interface: str | None = None,
) -> Session:
    """Make an ordinary training loop data-parallel; start the script under mpirun or torchrun.

    Gradients leave during `loss.backward()`; `optimizer.step()` waits until they are means over the
    workers. Rank 0's parameters and buffers replace those of the others at once. The rest of the
    loop stays as it is; give each rank its own samples (`session.backend.rank` of
    `session.backend.size`). When the process ends the session ends with it, or call `close()`.

    Args:
        model: built alike on all ranks.
        optimizer: of the model's parameters.
        backend: `name[:key=value,...]`, as on the command line.
        deadline_s: a lost rank raises `RankLost` on all others within this time.
        patience_s: how long a rank that is alive may take between two steps (evaluating, saving)
            before the others give up on it.
        interface: network interface or address to use; None = decided here.

    Returns:
        The session: `synchronize()` before clipping, `accumulating()` for gradient accumulation.

    Raises:
        UnknownName, UsageError, Unavailable: the backend cannot be used.
        UsageError: it needs server processes of its own, which a script cannot become.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> session = distribute(model, optimizer, backend="gloo")
        >>> model(torch.ones(1, 4)).sum().backward(); optimizer.step()
        >>> session.close()
    """
    kind, options = resolve_backend(backend)
    if kind.num_servers(options):
        raise UsageError(
            f"backend {backend!r} needs dedicated server processes, and this script is a worker on "
            "every rank; use servers=colocated, or `testbed run --workload my_model.py:build`"
        )
    role = assign_role(who_am_i(), kind, options, None)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    group = join(role, interface=interface, deadline_s=deadline_s, device=str(device))
    opened = open_backend(role, group)
    session = Session(model, optimizer, opened, group.control, patience_s=patience_s)

    def leave() -> None:
        # A rank that is done early keeps its colocated server up for the others.
        group.control.set_state("waiting for the other ranks to finish")
        group.control.all_gather("leave", b"", LEAVE_S, members=group.size)
        opened.close(group.deadline_s)
        group.control.close()

    session.on_close(leave)
    atexit.register(_end, session, group.control)
    return session


def _end(session: Session, control: Control) -> None:
    """At interpreter exit: leave in good order, or tell the others why not."""
    error = getattr(sys, "last_value", None)
    if error is None:
        session.close()
        return
    control.report_failure(f"it failed while {control.state} with {type(error).__name__}: {error}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)  # a library that waits for lost ranks cannot be finalised
