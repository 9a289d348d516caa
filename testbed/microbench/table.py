"""The text of `testbed comm`: nccl-tests' columns after the backend's name, or OSU's columns."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from testbed.cluster.facts import Facts
from testbed.microbench.bandwidth import BYTES_PER_GB
from testbed.microbench.results import total_wrong
from testbed.records.comm import CommConfig, CommResult
from testbed.statistics.summary import quantile

COLUMNS = (
    ("size", "(B)", 12),
    ("count", "(elements)", 12),
    ("type", "", 9),
    ("redop", "", 6),
    ("time", "(us)", 11),
    ("algbw", "(GB/s)", 8),
    ("busbw", "(GB/s)", 8),
    ("#wrong", "", 7),
)
LINE_RATE = ("line", "rate", 7)
PER_ITERATION = (("min", "(us)", 11), ("max", "(us)", 11), ("p99", "(us)", 11), ("cv", "(%)", 7))


@dataclass(frozen=True)
class Emulation:
    """What the table says of the emulated cluster that was measured in.

    Attributes:
        spec: of the cluster.
        dilation: real times are divided by it.
        line_bps: bits per second that the kernel lets through the slowest link, where every node
            has one rank; None = no shares of the line rate.
        latency: how latency is made: `netem`, `injected` or `none`.
    """

    spec: str
    dilation: float
    line_bps: float | None
    latency: str


def emulation_of(facts: Facts | None) -> Emulation | None:
    """What the table needs of the cluster that this process is in; None = it is in none."""
    if facts is None:
        return None
    record = facts.record
    one_each = record["ranks_per_node"] == 1
    line_bps = record["slowest_kernel_bps"] if one_each else None
    return Emulation(facts.spec, facts.dilation, line_bps, record["latency"])


def columns(
    emulation: Emulation | None, per_iteration: bool = False
) -> tuple[tuple[str, str, int], ...]:
    """Head, unit and width of each column."""
    shown = emulation is not None and emulation.line_bps is not None
    more = PER_ITERATION if per_iteration else ()
    return (*COLUMNS, LINE_RATE, *more) if shown else (*COLUMNS, *more)


def header(
    config: CommConfig,
    hosts: Sequence[str],
    launcher: str,
    emulation: Emulation | None = None,
    *,
    per_iteration: bool = False,
) -> str:
    """What was measured and how, and the names of the columns."""
    distinct = list(dict.fromkeys(hosts))
    checked = f"the last {config.check} checked" if config.check else "none checked"
    lines = [
        f"# testbed comm: {config.op} of {config.dtype} on {config.device}",
        f"# workers: {config.workers} on {len(distinct)} host(s): {', '.join(distinct)}; "
        f"launcher: {launcher}",
        f"# warm-up: {config.warmup}, timed: {config.iters} ({checked}), backends in turns, "
        f"order seed {config.seed}",
        "# time: median over timed exchanges of the slowest rank; GB = 1e9 bytes",
        *(["# min, max, p99, cv: over the same exchanges"] if per_iteration else []),
        *_emulation_lines(emulation),
        "#",
    ]
    width, shown = backend_width(config), columns(emulation, per_iteration)
    for number in (0, 1):
        words = [" ".join(f"{column[number]:>{column[2]}}" for column in shown)]
        first = "# backend" if number == 0 else "#"
        lines.append(f"{first:<{width}} {words[0]}".rstrip())
    return "\n".join(lines) + "\n"


def _emulation_lines(emulation: Emulation | None) -> list[str]:
    if emulation is None:
        return []
    lines = [f"# emulated cluster: {emulation.spec}; latency: {emulation.latency}"]
    if emulation.dilation != 1:
        lines.append(
            f"# dilation {emulation.dilation:g}: times and bandwidths are the cluster's, "
            f"real times {emulation.dilation:g} times as long"
        )
    if emulation.line_bps is not None:
        slowest_bps = emulation.line_bps * emulation.dilation
        lines.append(
            f"# line rate: busbw over the {slowest_bps / 1e6:g} Mbit/s of the slowest link, "
            "headers (4.4 %) included"
        )
    return lines


def backend_width(config: CommConfig) -> int:
    """Characters of the first column."""
    return max(len("# backend"), *(len(name) + 2 for name in config.backend))


def row(
    config: CommConfig,
    result: CommResult,
    emulation: Emulation | None = None,
    *,
    per_iteration: bool = False,
) -> str:
    """One line; a reduction has a `redop`, a gather or broadcast none, as in nccl-tests."""
    dilation = emulation.dilation if emulation else 1.0
    share = result.line_rate_share
    wrong = "N/A" if result.num_wrong is None else str(result.num_wrong)
    cells = (
        str(result.num_bytes),
        str(result.count),
        result.dtype,
        "sum" if result.op in ("sum", "fold-spread") else "none",
        f"{result.time_s / dilation * 1e6:.2f}",
        _gigabytes(result.algbw_bytes_per_s * dilation),
        _gigabytes(result.busbw_bytes_per_s * dilation),
        wrong,
        *([] if share is None else [f"{share:.3f}"]),
        *(_per_iteration(result.samples_s, dilation) if per_iteration else ()),
    )
    widths = [width for _, _, width in columns(emulation, per_iteration)]
    words = " ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
    return f"{'  ' + result.backend:<{backend_width(config)}} {words}\n"


def _per_iteration(samples_s: Sequence[float], dilation: float) -> list[str]:
    """Least, largest, 99 % quantile, and standard deviation over mean of all timed exchanges."""
    times_s = (min(samples_s), max(samples_s), quantile(samples_s, 0.99))
    cv = statistics.pstdev(samples_s) / statistics.fmean(samples_s)
    return [*(f"{time_s / dilation * 1e6:.2f}" for time_s in times_s), f"{100 * cv:.1f}"]


def osu(
    config: CommConfig, results: Sequence[CommResult], emulation: Emulation | None = None
) -> str:
    """The results in the columns of the OSU micro-benchmarks, one block for each backend.

    Each rank's latency is its mean over the timed exchanges; the columns are mean, least and
    largest of these over the ranks.

    Reference:
        OSU micro-benchmarks, `osu_allreduce --full`. Departs: a gather's size is that of the whole
        result, not of one rank's part.
    """
    scale = 1e6 / (emulation.dilation if emulation else 1.0)
    blocks = []
    for name in config.backend:
        lines = [
            f"# testbed {config.op} latency test: {name}, {config.workers} workers",
            f"# Datatype: {config.dtype}.",
            f"{'# Size':<10}{'Avg Latency(us)':>18}{'Min Latency(us)':>18}{'Max Latency(us)':>18}"
            f"{'Iterations':>12}",
        ]
        for found in (result for result in results if result.backend == name):
            ranks_us = [scale * mean_s for mean_s in found.rank_means_s]
            times_us = (statistics.fmean(ranks_us), min(ranks_us), max(ranks_us))
            shown = "".join(f"{time_us:>18.2f}" for time_us in times_us)
            lines.append(f"{found.num_bytes:<10}{shown}{len(found.samples_s):>12}")
        blocks.append("\n".join(lines) + "\n")
    if wrong := total_wrong(results):
        blocks.append(f"# Out of bounds values : {wrong} FAILED\n")
    return "\n".join(blocks)


def footer(
    config: CommConfig, results: Sequence[CommResult], emulation: Emulation | None = None
) -> str:
    """The number of wrong elements, and the mean busbw of all rows and of each backend."""
    dilation = emulation.dilation if emulation else 1.0
    wrong = total_wrong(results)
    average = _average(results, dilation)
    lines = [
        f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}",
        f"# Avg bus bandwidth    : {average}",
    ]
    if len(config.backend) > 1:
        width = max(len(name) for name in config.backend)
        for name in config.backend:
            own = [result for result in results if result.backend == name]
            lines.append(f"#   {name:<{width}} : {_average(own, dilation)}")
    return "\n".join(lines) + "\n"


def _average(results: Sequence[CommResult], dilation: float) -> str:
    return _gigabytes(dilation * statistics.fmean(r.busbw_bytes_per_s for r in results))


def _gigabytes(bytes_per_s: float) -> str:
    value = bytes_per_s / BYTES_PER_GB
    return f"{value:.2f}" if value >= 100 else f"{value:.3f}"
