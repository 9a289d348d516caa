"""From `--scheduler` to a plan that all ranks share, before the backend is opened for training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from testbed.backends.protocol import Group
from testbed.config import RunConfig
from testbed.launch.join import Role, open_backend
from testbed.prediction.crossing import predict
from testbed.prediction.files import load_link, load_trace
from testbed.prediction.link import Link
from testbed.prediction.trace import Trace
from testbed.profiling.link import measure_link
from testbed.profiling.recorder import record_trace
from testbed.profiling.step import training_step
from testbed.scheduling.plan import Plan
from testbed.scheduling.plan_file import load_plan
from testbed.scheduling.protocol import make_plan, resolve_scheduler
from testbed.training.plans import Replan, replanner
from testbed.training.replica import make_replica, sample_order
from testbed.training.sampling import SampleCursor
from testbed.workload import Workload

PLAN_S = 600.0
PROBE = "probe"  # what the backend is called that only measures the link


@dataclass(frozen=True)
class Planned:
    """What the ranks agreed on.

    Attributes:
        plan: the plan of the first step.
        replan: makes it anew from the order of the first step's gradients; None = it stays.
        trace: what it was made from, if a profile was needed.
        link: likewise.
    """

    plan: Plan
    replan: Replan | None = None
    trace: Trace | None = None
    link: Link | None = None


def measures_link(config: RunConfig) -> bool:
    """Whether a run opens the backend once more, before training, to measure the link."""
    profiled = config.predict or resolve_scheduler(config.scheduler)[0].needs_profile
    return profiled and config.plan is None and config.link is None


def prepare(
    config: RunConfig, role: Role, group: Group, workload: Workload, build: Callable[[], Workload]
) -> Planned:
    """Plan on rank 0 and share the plan; collective over the workers.

    A scheduler that needs times gets them from `--trace` and `--link`, or from a profile of a
    second copy of the model and a measurement of the link, both made here before training.
    """
    kind, _ = resolve_scheduler(config.scheduler)
    named = [(n, p) for n, p in workload.model.named_parameters() if p.requires_grad]
    if config.plan is not None:
        return Planned(load_plan(Path(config.plan)))
    replan = None if kind.needs_profile else replanner(config.scheduler, named)
    if replan is not None and not config.predict:
        return Planned(replan([name for name, _ in reversed(named)]), replan)
    trace = load_trace(Path(config.trace)) if config.trace else _profile(config, group, build())
    link = load_link(Path(config.link)) if config.link else _measure(config, role, group)
    plan = make_plan(config.scheduler, trace, link)
    shared = _from_rank_0(group, "plan", msgspec.json.encode(plan))
    return Planned(msgspec.json.decode(shared, type=Plan), replan, trace, link)


def group_for(plan: Plan, group: Group) -> Group:
    """The group with the order, channels and credit that the plan asks for."""
    return replace(
        group,
        order=plan.order,
        num_channels=max(plan.num_channels, group.num_channels),
        credit_bytes=plan.credit_bytes,
    )


def _profile(config: RunConfig, group: Group, workload: Workload) -> Trace:
    """Rank 0's times, measured while all ranks compute, as they will in training."""
    group.control.set_state("profiling the workload")
    order = sample_order(config, workload, group.size)
    replica = make_replica(workload, config, 1)
    replica.model.train()
    indices = SampleCursor(order, group.rank).indices(0)
    batch = replica.to_device(replica.workload.train.batch(indices))
    trace = record_trace(
        replica.model,
        training_step(replica.loss, batch, replica.scaler),
        name=config.workload,
        device=config.device,
        batch_size=order.batch_size,
    )
    shared = _from_rank_0(group, "trace", msgspec.json.encode(trace))
    return msgspec.json.decode(shared, type=Trace)


def _measure(config: RunConfig, role: Role, group: Group) -> Link:
    group.control.set_state("measuring the link")
    probe = replace(group, name=PROBE)
    backend = open_backend(role, probe)
    link = measure_link(
        backend,
        group.control,
        num_workers=group.size,
        deadline_s=group.deadline_s,
        name=config.backend,
        device=group.device,
    )
    group.control.all_gather("probed", b"", PLAN_S, members=group.size)
    backend.close(group.deadline_s)
    shared = _from_rank_0(group, "link", msgspec.json.encode(link))
    return msgspec.json.decode(shared, type=Link)


def _from_rank_0(group: Group, name: str, mine: bytes) -> bytes:
    """Rank 0's value on all ranks: ranks measure different times and must not plan differently."""
    given = mine if group.rank == 0 else b""
    return group.control.all_gather(name, given, PLAN_S, members=group.size)[0]


def predicted_step_s(planned: Planned) -> float | None:
    """What the model says a step takes; None without trace and link.

    The optimizer's own time is not part of a trace, and so not of the prediction.
    """
    if planned.trace is None or planned.link is None:
        return None
    return predict(planned.plan, planned.trace, planned.link).iteration_s
