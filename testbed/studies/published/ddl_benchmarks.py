"""Samples per second of all-reduce methods on 32 GPUs, 10 Gbit/s Ethernet."""

from __future__ import annotations

from typing import Final

from testbed.base.files import load_shipped_trace
from testbed.studies.published.lines import (
    EIGHT_NODES,
    Line,
    gain,
    iteration_s,
    link_of,
    value,
    with_totals,
)

PAPER: Final = "Survey (Shi et al., 2020, arXiv 2005.13247), 32 GPUs = 8 nodes x 4, 10GbE"
NUM_WORKERS: Final = 32
# Trace -> batch, samples/s of one GPU; then of BSP, WFBP, MG-WFBP and ByteScheduler on all.
TABLE: Final = {
    "resnet50-v100": (64, 253.1, (4921, 5113, 6884, 4754)),
    "bert-base-2080ti": (64, 212.8, (1927, 2013, 1926, 2260)),
}
SPECS: Final = ("sequential", "wfbp", "mg-wfbp", "bytescheduler")
AS_SLOW_AS_BSP: Final = (
    "MG-WFBP was measured as slow as BSP on this model, as if it had merged everything or hidden "
    "nothing; with the constants of any number of GPUs the rule makes two to nine messages of it "
    "and hides some of them"
)
START_UPS: Final = (
    "start-ups of 1.37 ms for each of 161 or 206 messages cost more than the overlap gains; with "
    "0.95 ms WFBP is 4 % ahead of BSP on ResNet-50 and still 3 % behind on BERT-Base"
)
COORDINATION: Final = (
    "measured, ByteScheduler is slower than WFBP on ResNet-50; a + b M has no cost for the "
    "coordination between workers that a priority queue needs"
)
PARTITIONS: Final = (
    "partitions of 4 MiB pay a start-up each; with partitions of 16 MiB it is 5 % ahead of WFBP"
)


def ddl_benchmarks_lines() -> list[Line]:
    """Gains of the merged and prioritised methods over WFBP and BSP, and throughputs.

    The link is that of eight nodes with a GPU each; compute from one GPU's throughput, a third of
    it forward. Columns of parameter servers are left out: their number is not published.
    """
    lines = []
    for name, (batch_size, alone, published) in TABLE.items():
        compute_s = batch_size / alone
        trace = with_totals(load_shipped_trace(name), compute_s / 3, 2 * compute_s / 3)
        link = link_of(EIGHT_NODES, NUM_WORKERS)
        samples = NUM_WORKERS * batch_size
        ours = {spec: samples / iteration_s(spec, trace, link) for spec in SPECS}
        theirs = dict(zip(SPECS, published, strict=True))
        for fast, slow, reason in (
            ("mg-wfbp", "wfbp", AS_SLOW_AS_BSP),
            ("mg-wfbp", "sequential", AS_SLOW_AS_BSP),
            ("wfbp", "sequential", START_UPS),
            ("bytescheduler", "wfbp", COORDINATION if published[3] < published[1] else PARTITIONS),
        ):
            quantity = f"{fast} over {slow}"
            ratio = ours[fast] / ours[slow]
            lines.append(gain(PAPER, name, quantity, theirs[fast] / theirs[slow], ratio, reason))
        lines += [value(PAPER, name, f"{s}, samples/s", theirs[s], ours[s]) for s in SPECS]
    return lines
