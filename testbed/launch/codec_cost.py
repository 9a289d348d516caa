"""What a run under a compressor is predicted to take, from what compressing costs on its ranks."""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from testbed.backends.protocol import Group
from testbed.base.link import Link
from testbed.base.plan import Plan
from testbed.base.trace import Trace
from testbed.control.protocol import gather
from testbed.prediction.algorithms import (
    Algorithm,
    algorithm_of,
    declared_algorithm,
    parse_algorithm,
    sums_on_servers,
)
from testbed.prediction.codec import CodecCost, CodecSample, sped_up
from testbed.profiling.codec import SIZES, measure_codec
from testbed.scheduling.under_compressor import CompressedExchange, plan_under

MAX_PLAYED = 64  # turns on one machine: each of its ranks plays all workers
MEASURE_S = 600.0
NUM_HELPERS = 2  # threads of a rank that encode and decode


@dataclass(frozen=True)
class CodecHere:
    """What compressing costs on a job's ranks.

    Attributes:
        codec: seconds of a rank while all ranks compress, in the time of the emulated cluster.
        one_core: ranks have no core for each of the threads that encode and decode.
    """

    codec: CodecCost
    one_core: bool


class _Told(msgspec.Struct, frozen=True):
    """What a rank tells the others."""

    machine: str
    cores: tuple[int, ...]
    codec: CodecCost


def codec_here(
    compressor: str, link: Link, num_elements: int, group: Group, dilation: float = 1.0
) -> CodecHere | None:
    """Time the compressor on all ranks at once; None: nothing could be predicted. Collective.

    They may be too many, or the link's backend declares no algorithm.

    It is timed at some sizes up to all gradients in one, on as many threads as training has.
    Ranks that share cores compress at the same time in training too, so they are timed together,
    and the median over ranks counts. Where everything is `dilation` times slower, compressing is
    not: in the cluster's own time it is as many times faster.
    """
    if declared_algorithm(link.backend) is None:
        return None
    group.control.state = f"timing {compressor}"
    machine = group.machine
    machines = group.control.all_gather("machines", machine.encode(), MEASURE_S, members=group.size)
    if link.num_workers * max(Counter(machines).values()) > MAX_PLAYED:
        return None
    sizes = sorted({min(size, max(num_elements, 1)) for size in SIZES})
    codec = measure_codec(
        compressor,
        link.num_workers,
        sizes=sizes,
        merges=sums_on_servers(link),
        typical=True,
        device=group.device,
    )
    mine = _Told(machine, tuple(sorted(os.sched_getaffinity(0))), codec)
    told = gather(group.control, "codec", mine, _Told, MEASURE_S, group.size)
    here = [each for each in told if each.machine == mine.machine]
    num_cores = len({core for each in here for core in each.cores})
    return CodecHere(
        sped_up(_median([each.codec for each in told]), dilation),
        one_core=group.device == "cpu" and num_cores < NUM_HELPERS * len(here),
    )


def compressed_plan(
    make: Callable[[Link], Plan], trace: Trace, link: Link, here: CodecHere, max_channels: int
) -> Plan:
    """The faster of the scheduler's two plans for these ranks, see `plan_under`."""
    how = CompressedExchange(here.codec, _algorithm(link), here.one_core, max_channels)
    return plan_under(make, trace, link, how)[0]


def compressed_iteration_s(
    plan: Plan, trace: Trace, link: Link, here: CodecHere, *, launches: bool = False
) -> float:
    """Seconds of one iteration of the plan, in the time of trace and link.

    Raises:
        UsageError: a plan with ratios for a compressor without one.
    """
    how = CompressedExchange(here.codec, _algorithm(link), here.one_core, launches=launches)
    return how.timeline(plan, trace, link).iteration_s


def _algorithm(link: Link) -> Algorithm:
    return parse_algorithm(algorithm_of(link.backend))


def _median(costs: Sequence[CodecCost]) -> CodecCost:
    """Medians of the ranks' seconds; bytes are the first one's."""
    samples = [
        _median_sample(of_ranks) for of_ranks in zip(*(c.samples for c in costs), strict=True)
    ]
    return msgspec.structs.replace(costs[0], samples=tuple(samples))


def _median_sample(samples: Sequence[CodecSample]) -> CodecSample:
    alike = [s for s in samples if len(s.rounds) == len(samples[0].rounds)]
    stages = zip(*(s.compute_s for s in alike), strict=True)
    rounds = zip(*(s.rounds for s in alike), strict=True)
    return CodecSample(
        num_elements=samples[0].num_elements,
        compute_s=tuple(statistics.median(stage) for stage in stages),
        rounds=tuple(
            msgspec.structs.replace(each[0], merge_s=statistics.median(r.merge_s for r in each))
            for each in rounds
        ),
    )
