"""What a run under a compressor is predicted to take, from what compressing costs on this rank."""

from __future__ import annotations

from testbed.prediction.algorithms import Server, algorithm_of, parse_algorithm
from testbed.prediction.codec import sped_up
from testbed.prediction.compressed import compressed_timeline
from testbed.prediction.link import Link
from testbed.prediction.trace import Trace
from testbed.profiling.codec import SIZES, measure_codec
from testbed.scheduling.plan import Plan

MAX_WORKERS = 64  # all ranks' turns are taken in one process


def compressed_iteration_s(
    plan: Plan, trace: Trace, link: Link, compressor: str, dilation: float = 1.0
) -> float | None:
    """Seconds of one iteration of the plan, in the time of trace and link; None: too many workers.

    The compressor is timed here and now, at some sizes up to the plan's largest message, on as many
    threads as training has. Where everything is `dilation` times slower, it is not: in the
    cluster's own time it is as many times faster.

    Raises:
        UsageError: a plan with ratios for a compressor without one.
    """
    if link.num_workers > MAX_WORKERS:
        return None
    largest = max((sum(p.stop - p.start for p in m.parts) for m in plan.messages), default=1)
    sizes = sorted({min(size, max(largest, 1)) for size in SIZES})
    algorithm = parse_algorithm(algorithm_of(link.backend))
    codec = measure_codec(
        compressor, link.num_workers, sizes=sizes, merges=isinstance(algorithm, Server)
    )
    return compressed_timeline(plan, trace, link, algorithm, sped_up(codec, dilation)).iteration_s
