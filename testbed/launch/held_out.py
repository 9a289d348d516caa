"""What cells will take, before any of them runs: on links that were fitted elsewhere or nominal."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from testbed.base.axes import BACKENDS, COMPRESSORS, WORKLOADS
from testbed.base.config import RunConfig
from testbed.base.errors import UsageError
from testbed.base.files import find_trace
from testbed.base.link import Link
from testbed.base.plan import Plan, load_plan
from testbed.base.trace import Trace
from testbed.base.units import parse_rate
from testbed.cluster.spec import ClusterSpec, dilation_of, parse_cluster
from testbed.launch.codec_cost import NUM_HELPERS, CodecHere, compressed_plan
from testbed.launch.plan_options import plan_for, why_whole
from testbed.launch.planning import Planned, predicted_step_s
from testbed.prediction.codec import CodecCost, sped_up
from testbed.prediction.emulated import Setting, setting_of
from testbed.prediction.nominal import (
    SHAPED_HEADERS,
    Nominal,
    link_among,
    link_in,
    num_startups,
    read_link,
)
from testbed.records.forecast import FEW, MANY, OVERTAKING, ForecastCell, cell_name
from testbed.records.store import cell_key
from testbed.scheduling.under_compressor import overlapped
from testbed.workloads.load import load_workload

FREE: Final = 1e12  # so many times as fast, compressing takes no time


@dataclass(frozen=True)
class Known:
    """What is known before any cell runs.

    Attributes:
        links: fitted before, by the name of their file; a cell that names a link has that one.
        null: nominal numbers; None = those of a cell's own emulated cluster.
        codecs: what compressors cost, measured alone on this machine, by the backend that they are
            for; under the empty name those for all other backends.
        num_cores: that the ranks of a cell share.
    """

    links: Mapping[str, Link] = field(default_factory=dict)
    null: Nominal | None = None
    codecs: Mapping[str, Sequence[CodecCost]] = field(default_factory=dict)
    num_cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))


def forecast_cells(configs: Sequence[RunConfig], known: Known) -> list[ForecastCell]:
    """The forecast of each cell of a sweep; what cannot be foreseen says why."""
    traces: dict[tuple[str, str | None], Trace | None] = {}
    return [_foresee(config, known, traces) for config in configs]


def _foresee(
    config: RunConfig, known: Known, traces: dict[tuple[str, str | None], Trace | None]
) -> ForecastCell:
    cell = ForecastCell(
        key=cell_key(msgspec.structs.replace(config, repeat=0)),
        name=cell_name(config),
        backend=BACKENDS.resolve(config.backend).name,
    )
    try:
        trace = _trace(config, traces)
        held_out = link_for(config, known.links, known.num_cores)
        codec = codec_for(config, known)
    except UsageError as error:
        return msgspec.structs.replace(cell, why_not=str(error))
    plan = _plan(config, trace, held_out, codec)
    nominal = known.null or nominal_of(config.cluster)
    null_s = None
    if nominal is not None:
        link = nominal.link(config.backend, config.workers)
        free = codec and CodecHere(sped_up(codec.codec, FREE), codec.one_core)
        null_s = _step_s(config, plan, trace, link, free)
    return msgspec.structs.replace(
        cell,
        plan_class=plan_class(plan),
        plan_digest=plan.digest(),
        held_out_s=_step_s(config, plan, trace, held_out, codec),
        null_s=null_s,
        why_not="" if nominal is not None else "no emulated cluster and no --null: no nominal rate",
    )


def scorer(config: RunConfig) -> Callable[[RunConfig], float]:
    """What the link model says of variants of a cell, in real seconds of a step.

    Args:
        config: of the cell; its own trace and link count, else a replay's trace, and the nominal
            numbers of its emulated cluster.

    Raises:
        UsageError: it says neither what is computed nor over which link, or has a compressor.
    """
    if not COMPRESSORS.is_default(config):
        raise UsageError(
            f"what compressor {config.compressor!r} costs is measured when the cell runs"
        )
    trace = _trace(config, {}) if config.trace is None else find_trace(config.trace)
    if config.link is not None:
        link = link_for(config, {}, Known().num_cores)
    elif (nominal := nominal_of(config.cluster)) is not None:
        link = nominal.link(config.backend, config.workers)
    else:
        raise UsageError(
            "nothing says over which link; expected --link FILE (testbed comm --fit), --link "
            "rate=10gbit,latency=50us or --cluster"
        )
    launches = WORKLOADS.resolve(config.workload).facts.stretches

    def step_s(variant: RunConfig) -> float:
        plan = _plan(variant, trace, link, None)
        found = _step_s(variant, plan, trace, link, None, launches=launches)
        assert found is not None
        return found

    return step_s


def _trace(config: RunConfig, traces: dict[tuple[str, str | None], Trace | None]) -> Trace:
    """Of a replay, whose times are known before it runs.

    Raises:
        UsageError: the workload really computes, or the backend is not predicted.
    """
    facts = BACKENDS.resolve(config.backend).facts
    if not facts.exchanges:
        raise UsageError(f"backend {config.backend!r} sends nothing: a step is its compute")
    if facts.schedule is not None and facts.schedule.compresses:
        raise UsageError(f"what backend {config.backend!r} compresses is not predicted")
    what = (config.workload, config.data)
    if what not in traces:
        workload = load_workload(config.workload, seed=config.seed, data_dir=config.data)
        recorded = workload.recorded
        traces[what] = recorded if isinstance(recorded, Trace) else None
    found = traces[what]
    if found is None:
        raise UsageError(f"what {config.workload} computes is measured when the cell runs")
    return found


def codec_for(config: RunConfig, known: Known) -> CodecHere | None:
    """What the cell's compressor costs, in its cluster's own time; None: it has none.

    Measured alone, the cost of a rank grows as ranks outnumber cores, since all compress at once:

        c' = c max(1, ranks / cores) / dilation

    Raises:
        UsageError: no cost of it for as many workers was given.
    """
    if COMPRESSORS.is_default(config):
        return None
    backend = BACKENDS.resolve(config.backend).name
    costs = known.codecs.get(backend) or known.codecs.get("", ())
    for cost in costs:
        if (cost.compressor, cost.num_workers) == (config.compressor, config.workers):
            share = min(1.0, known.num_cores / config.workers)
            speed = share * dilation_of(config.cluster)
            crowded = known.num_cores < NUM_HELPERS * config.workers
            return CodecHere(sped_up(cost, speed), config.device == "cpu" and crowded)
    raise UsageError(
        f"no cost of {config.compressor!r} for {config.workers} workers was given (there is "
        f"{', '.join(f'{c.compressor} for {c.num_workers}' for c in costs) or 'none'}); measure it "
        "with `testbed simulate --compressor ... --codecs-out FILE` and give it with --codecs"
    )


def link_for(config: RunConfig, links: Mapping[str, Link], num_cores: int) -> Link:
    """The link of a cell's backend among as many workers on the cell's cluster, in its own time.

    Args:
        config: of the cell; its own link counts first.
        links: fitted before, by the name of their file.
        num_cores: that the nodes of the cluster share.

    Raises:
        UsageError: there is none, or it cannot be carried over.
    """
    if config.link is not None:
        found = read_link(config.link, config.backend, config.workers)
    else:
        found = _closest(config, links)
    there = found.extra.get("cluster")
    if config.cluster is None or there is None:
        return link_among(found, config.workers, config.backend)
    measured = setting_of(there)
    asked = _setting(config.cluster, config, measured, num_cores)
    return link_in(found, config.backend, config.workers, measured, asked)


def _closest(config: RunConfig, links: Mapping[str, Link]) -> Link:
    """Of the backend with the same options if there is one, else without; of as many workers."""
    wanted = BACKENDS.resolve(config.backend)
    same = [one for one in links.values() if BACKENDS.today(one.backend) == wanted.text]
    alike = [
        one
        for one in links.values()
        if (known := BACKENDS.find(one.backend)) is not None and known.name == wanted.name
    ]
    fitting = same or alike
    if not fitting:
        raise UsageError(
            f"no link of {config.backend} was given (there is "
            f"{', '.join(one.backend for one in links.values()) or 'none'}); fit one with `testbed "
            "comm --fit` and give it with --link, or name one in the recipe"
        )
    return next((one for one in fitting if one.num_workers == config.workers), fitting[0])


def _setting(cluster: str, config: RunConfig, like: Setting, num_cores: int) -> Setting:
    """A cluster that is not up yet; what it leaves to this machine is as it was measured."""
    usual, spec = ClusterSpec(), parse_cluster(cluster)
    latency_s = spec.latency_s
    if spec.latency_by != "injected":  # packets are delayed
        latency_s *= num_startups(config.backend, config.workers)
    return Setting(
        lowest_bps(spec),
        spec.dilation,
        latency_s,
        spec.cpu_policy,
        like.cores if spec.cores == usual.cores else spec.cores,
        like.awake and spec.awake == usual.awake,
        max(1.0, spec.nodes / num_cores),
    )


def lowest_bps(spec: ClusterSpec) -> float:
    """Bits per second of the slowest link of a cluster.

    Example:
        >>> lowest_bps(parse_cluster("nodes=2,rate=10gbit,up.2=1gbit"))
        1000000000.0
    """
    return min([spec.rate_bps, *(parse_rate(rate) for *_, rate in spec.links)])


def nominal_of(cluster: str | None) -> Nominal | None:
    """The numbers that an emulated cluster is asked for; None without one.

    Latency is counted for each hop of the algorithm, as packets are delayed. Without latency it
    is 0: any other number would be a guess that makes the null model easier to beat.

    Example:
        >>> nominal_of("nodes=2,rate=10gbit,dilation=10").latency
        '0'
    """
    if cluster is None:
        return None
    spec = parse_cluster(cluster)
    return Nominal(f"{lowest_bps(spec):.0f}bit", spec.latency, SHAPED_HEADERS)


def plan_class(plan: Plan) -> str:
    """Which kind of plan it is, by what makes it hard to predict.

    Example:
        >>> plan_class(Plan(scheduler="x", names=(), num_elements=(), dtypes=(), messages=()))
        'few messages'
    """
    if plan.order == "priority" or plan.halves or plan.crosses_iteration:
        return OVERTAKING
    return MANY if 2 * len(plan.messages) > max(len(plan.names), 2) else FEW


def _plan(config: RunConfig, trace: Trace, link: Link, codec: CodecHere | None) -> Plan:
    facts = BACKENDS.resolve(config.backend).facts
    own = facts.schedule
    if config.plan is not None:
        return load_plan(Path(config.plan))
    if codec is not None:
        make = partial(plan_for, config, trace)
        plan = compressed_plan(make, trace, link, codec, facts.max_channels)
        return overlapped(plan, None, facts.max_channels)[0]
    if own is None:
        return plan_for(config, trace, link)
    if own.plan_file:
        plan = load_plan(own.plan_file)
    else:
        plan = plan_for(msgspec.structs.replace(config, scheduler=own.like), trace, link)
    return msgspec.structs.replace(plan, scheduler=own.name)


def _step_s(
    config: RunConfig,
    plan: Plan,
    trace: Trace,
    link: Link,
    codec: CodecHere | None,
    *,
    launches: bool = True,
) -> float | None:
    planned = Planned(
        plan,
        trace=trace,
        link=link,
        micro_batches=config.accumulate,
        dilation=dilation_of(config.cluster),
        whole=why_whole(config),
        codec=codec,
        launches=launches,
    )
    return predicted_step_s(planned, config.compressor)
