"""From samples to the results that are shown and recorded."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from testbed.microbench.bandwidth import algbw_bytes_per_s, busbw_bytes_per_s
from testbed.microbench.contestants import Contestant, bus_factor_of
from testbed.microbench.measure import SizeSamples
from testbed.records.comm import CommConfig, CommResult
from testbed.statistics.summary import quantile


def results_of(
    config: CommConfig,
    contestants: Sequence[Contestant],
    samples: SizeSamples,
    line_bps: float | None = None,
) -> list[CommResult]:
    """The rows of one size, one per backend, in the order of `config.backend`.

    Args:
        config: what was measured.
        contestants: the backends.
        samples: of the size.
        line_bps: bits per second that the slowest link lets through; None = not known.
    """
    rows = []
    for number, contestant in enumerate(contestants):
        times_s = samples.samples_s[number]
        num_bytes, time_s = samples.size.num_bytes, quantile(times_s, 0.5)
        busbw = busbw_bytes_per_s(num_bytes, time_s, bus_factor_of(contestant, config))
        rows.append(
            CommResult(
                backend=contestant.text,
                num_workers=config.workers,
                num_bytes=num_bytes,
                count=samples.size.count,
                dtype=config.dtype,
                op=config.op,
                time_s=time_s,
                time_p5_s=quantile(times_s, 0.05),
                time_p95_s=quantile(times_s, 0.95),
                algbw_bytes_per_s=algbw_bytes_per_s(num_bytes, time_s),
                busbw_bytes_per_s=busbw,
                line_rate_share=None if line_bps is None else 8 * busbw / line_bps,
                num_wrong=samples.num_wrong[number],
                samples_s=list(times_s),
                fastest_s=quantile(samples.fastest_s[number], 0.5),
                rank_means_s=[statistics.fmean(own) for own in samples.by_rank_s[number]],
            )
        )
    return rows


def total_wrong(results: Sequence[CommResult]) -> int:
    """Wrong elements of all results; what was not checked counts as none."""
    return sum(r.num_wrong or 0 for r in results)
