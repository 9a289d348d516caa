"""From `--scheduler` to a plan that all ranks share, before the backend is opened for training."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec

from testbed.backends.protocol import Group
from testbed.base.axes import COMPRESSORS, OwnSchedule
from testbed.base.config import RunConfig
from testbed.base.errors import UsageError
from testbed.base.files import find_trace
from testbed.base.link import Link
from testbed.base.plan import Plan, load_plan
from testbed.base.trace import Trace
from testbed.cluster.facts import find_facts
from testbed.cluster.spec import ClusterSpec, dilation_of, parse_cluster
from testbed.control.protocol import decided_by_first
from testbed.launch.codec_cost import (
    CodecHere,
    codec_here,
    compressed_iteration_s,
    compressed_plan,
)
from testbed.launch.join import Role
from testbed.launch.link_probe import PLAN_S, LinkProbe
from testbed.launch.plan_options import plan_for, why_whole
from testbed.noise.rehearsal import is_rehearsed, rehearsal_of, second_copy
from testbed.prediction.cross_iteration import predict
from testbed.prediction.emulated import setting_of, stretched_link
from testbed.prediction.nominal import (
    kind_of,
    link_among,
    link_in,
    num_startups,
    read_link,
    seen_in_run,
)
from testbed.prediction.rehearsal_fit import fit_to_rehearsal
from testbed.profiling.overhead import Overhead, measure_overhead, training_step
from testbed.profiling.recorder import record_trace
from testbed.scheduling.protocol import needs_profile
from testbed.scheduling.under_compressor import overlapped
from testbed.training.exchange.setup import Replan, replanner
from testbed.training.replica import update
from testbed.workloads.workload import Workload


@dataclass(frozen=True)
class Planned:
    """What the ranks agreed on.

    Attributes:
        plan: the plan of the first step.
        replan: makes it anew from the order of the first step's gradients; None = it stays.
        trace: what it was made from, if a profile was needed.
        link: likewise; with `--rehearse` corrected by what messages took in steps of the plan.
        fitted: the link without what rehearsed steps added to it; None = they added nothing.
        overhead: what a step does beside what trace and link tell, on this rank.
        micro_batches: forward and backward passes of a step; only the last one's gradients leave.
        dilation: how many times slower than trace and link everything is here.
        whole: what makes every step wait for the whole mean gradient, see `why_whole`.
        role: with the options that the backend had when its link was measured.
        codec: what the run's compressor costs, if it has one and can be timed.
        kind: of what is predicted, see `Cell.prediction`.
        launches: a device computes by itself (a replay's): see `prediction.host.Host`.
    """

    plan: Plan
    replan: Replan | None = None
    trace: Trace | None = None
    link: Link | None = None
    fitted: Link | None = None
    overhead: Overhead = field(default_factory=Overhead)
    micro_batches: int = 1
    dilation: float = 1.0
    whole: str = ""
    role: Role | None = None
    codec: CodecHere | None = None
    kind: str = ""
    launches: bool = False


def measures_link(config: RunConfig) -> bool:
    """Whether a run opens the backend once more, before training, to measure the link."""
    profiled = config.predict or needs_profile(config.scheduler)
    return profiled and config.plan is None and config.link is None


def prepare(
    config: RunConfig, role: Role, group: Group, workload: Workload, build: Callable[[], Workload]
) -> Planned:
    """Plan on rank 0 and share the plan; collective over the workers.

    A scheduler that needs times gets them from `--trace` and `--link`, or from a profile of a
    second copy of the model and a measurement of the link, both made here before training. A
    replayed workload is its own profile. All planning is done in the time of the emulated cluster:
    what is measured here is divided by the dilation.
    """
    own = role.backend.facts.schedule
    if own is None:
        planned = _prepare(config, role, group, workload, build)
        if COMPRESSORS.is_default(config) or config.plan is not None:
            return planned
        most = role.backend.facts.max_channels
        plan, replan = overlapped(planned.plan, planned.replan, most)
        return replace(planned, plan=plan, replan=replan)
    _check_latency(own, group)
    like = msgspec.structs.replace(
        config, scheduler=own.like, predict=config.predict and not own.compresses
    )
    given = load_plan(Path(own.plan_file)) if own.plan_file else None
    planned = _prepare(like, role, group, workload, build, given)
    reason = f"{own.name} decides for itself; predicted as {own.like}"
    if given is not None:
        reason = f"{own.name} carries out {own.plan_file}: {given.reason}"
    if own.compresses:
        reason = f"{own.name} decides for itself; what it compresses is not predicted"
    plan = msgspec.structs.replace(planned.plan, scheduler=own.name, reason=reason)
    return replace(planned, plan=plan, replan=None)


def _check_latency(own: OwnSchedule, group: Group) -> None:
    if group.latency_s > 0:
        raise UsageError(
            f"the cluster's latency is injected before each exchange, and those of {own.name} "
            "cannot be held up; leave out latency_by=injected, so that packets are delayed"
        )


def _prepare(
    config: RunConfig,
    role: Role,
    group: Group,
    workload: Workload,
    build: Callable[[], Workload],
    given: Plan | None = None,
) -> Planned:
    """See `prepare`; `given` is carried out whatever the scheduler would plan."""
    named = [(n, p) for n, p in workload.model.named_parameters() if p.requires_grad]
    if config.plan is not None:
        return Planned(load_plan(Path(config.plan)))
    replan = None
    if not needs_profile(config.scheduler):
        replan = replanner(config.scheduler, named, config.backend)
    if replan is not None and not config.predict:
        return Planned(given or replan([name for name, _ in reversed(named)]), replan)
    dilation = dilation_of(config.cluster)
    trace, overhead = _trace(config, group, workload, build)
    make = partial(plan_for, config, trace) if given is None else lambda link: given
    agree = partial(_agree_on_plan, config, group, trace, dilation, make)
    if config.link:
        seen = link = link_given(config.link, config.backend, group.size)
        plan, codec = agree(link, role)
    else:
        rehearsal = rehearsal_of(config, group, workload, build)
        with LinkProbe(config, role, group, trace, dilation, rehearsal) as probe:
            role, measured = probe.role, probe.measure()
            plan, codec = agree(stretched_link(measured, 1 / dilation), role)
            measured = probe.refine(plan, measured)
        link = stretched_link(probe.with_steal_time(measured), 1 / dilation)
        seen = fit_to_rehearsal(link, by_message=is_rehearsed(plan))
    return Planned(
        plan,
        replan,
        trace=trace,
        link=seen,
        fitted=None if seen is link else link,
        overhead=overhead,
        micro_batches=config.accumulate,
        dilation=dilation,
        whole=why_whole(config),
        role=role,
        codec=codec,
        kind=_kind(config, link),
        launches=isinstance(workload.recorded, Trace),
    )


def _kind(config: RunConfig, link: Link) -> str:
    if config.link is None:
        return "calibrated"
    kind = kind_of(link)
    return "calibrated" if kind == "held-out" and seen_in_run(config) else kind


def _agree_on_plan(
    config: RunConfig,
    group: Group,
    trace: Trace,
    dilation: float,
    make: Callable[[Link], Plan],
    link: Link,
    role: Role,
) -> tuple[Plan, CodecHere | None]:
    """Rank 0's plan on all ranks, and what the run's compressor costs here, if it has one."""
    codec = None
    if not COMPRESSORS.is_default(config):
        num_elements = sum(tensor.num_elements for tensor in trace.tensors)
        codec = codec_here(config.compressor, link, num_elements, group, dilation)
    if codec is None:
        plan = make(link)
    else:
        plan = compressed_plan(make, trace, link, codec, role.backend.facts.max_channels)
    encode = partial(msgspec.json.encode, plan)
    shared = decided_by_first(group.control, "plan", encode, PLAN_S, group.size)
    return msgspec.json.decode(shared, type=Plan), codec


def link_given(text: str, backend: str, num_workers: int) -> Link:
    """The link given, among these workers; carried here from another emulated cluster.

    Raises:
        UsageError: it cannot be read or carried.
    """
    link = read_link(text, backend, num_workers)
    here, there = find_facts(), link.extra.get("cluster")
    if here is None or there is None or {**there, "relay": 0} == {**here.record, "relay": 0}:
        return link_among(link, num_workers, backend)
    measured = setting_of(there)
    asked = setting_of(here.record, num_startups(backend, num_workers))
    if parse_cluster(here.spec).cores == ClusterSpec.cores:
        # Pinned where cores can be dealt out evenly, which nobody asked for: as in a forecast.
        if asked.cores == "shared":
            crowd = max(1.0, here.record["nodes"] / len(os.sched_getaffinity(0)))
            asked = replace(asked, nodes_per_core=crowd)
        asked = replace(asked, cores=measured.cores)
    return link_in(link, backend, num_workers, measured, asked)


def _trace(
    config: RunConfig, group: Group, workload: Workload, build: Callable[[], Workload]
) -> tuple[Trace, Overhead]:
    """Where the times come from, and what a step does that they do not hold.

    A replayed step has nothing beside its trace: the optimizer's real time counts against the
    recorded times.
    """
    if isinstance(workload.recorded, Trace):
        return (find_trace(config.trace) if config.trace else workload.recorded), Overhead()
    if config.trace is not None:
        return find_trace(config.trace), Overhead()
    return _profile(config, group, build())


def _profile(config: RunConfig, group: Group, workload: Workload) -> tuple[Trace, Overhead]:
    """Rank 0's times of one micro-batch, measured while all ranks compute, as in training."""
    group.control.state = "profiling the workload"
    replica, fetch, batch_size = second_copy(config, group, workload)
    step = training_step(replica.loss, fetch(), replica.scaler)
    trace = record_trace(
        replica.model,
        step,
        name=config.workload,
        device=config.device,
        batch_size=batch_size,
    )
    overhead = measure_overhead(
        fetch, step, lambda: update(replica, config.clip_norm), replica.device
    )
    encode = partial(msgspec.json.encode, trace)
    shared = decided_by_first(group.control, "trace", encode, PLAN_S, group.size)
    return msgspec.json.decode(shared, type=Trace), overhead


def predicted_step_s(planned: Planned, compressor: str = "none") -> float | None:
    """What the model says a step takes here; None without trace and link, or the codec's cost.

        (k - 1) (t_f + t_b) + iteration of the plan + overhead,  k the micro-batches

    all of it times the dilation. Where every step waits for the whole mean gradient, forward starts
    when all messages have ended, also with a plan that could cross the iteration boundary. Under a
    compressor the iteration is `compressed_iteration_s`.
    """
    trace, link = planned.trace, planned.link
    if trace is None or link is None:
        return None
    earlier_s = (planned.micro_batches - 1) * (trace.forward_s + trace.backward_s)
    beside_s = planned.overhead.of_step_s(planned.micro_batches)
    plan = planned.plan
    if planned.whole:
        plan = msgspec.structs.replace(plan, crosses_iteration=False)
    if compressor == COMPRESSORS.default:
        last_s = predict(plan, trace, link, launches=planned.launches).iteration_s
    elif planned.codec is None:
        return None
    else:
        last_s = compressed_iteration_s(plan, trace, link, planned.codec, launches=planned.launches)
    return planned.dilation * (earlier_s + last_s + beside_s)


@dataclass(frozen=True)
class Priced:
    """See `training.protocol.Pricing`; from the trace and the link of a run.

    Attributes:
        planned: with trace and link.
        config: of the run.
    """

    planned: Planned
    config: RunConfig

    def schedule_for(self, late_s: Mapping[str, float]) -> Plan:
        """See `Pricing.schedule_for`; the first plan where another would need other channels."""
        first, link = self.planned.plan, self.planned.link
        assert link is not None
        compressed = not COMPRESSORS.is_default(self.config)  # planned with what its codec costs
        if compressed or first.scheduler != self.config.scheduler:
            return first
        plan = plan_for(self.config, self._trace.delayed(late_s), link)
        form = ("order", "num_channels", "credit_bytes")  # that the backend was opened with
        return plan if all(getattr(plan, f) == getattr(first, f) for f in form) else first

    def iteration_s(self, plan: Plan, late_s: Mapping[str, float]) -> float:
        """See `Pricing.iteration_s`."""
        changed = replace(self.planned, trace=self._trace.delayed(late_s), plan=plan)
        found = predicted_step_s(changed, self.config.compressor)
        return 0.0 if found is None else found

    @property
    def _trace(self) -> Trace:
        assert self.planned.trace is not None
        return self.planned.trace


def pricing_of(planned: Planned, config: RunConfig) -> Priced | None:
    """What prices another step of a run; None without times, or without what a codec costs."""
    if predicted_step_s(planned, config.compressor) is None:
        return None
    return Priced(planned, config)
