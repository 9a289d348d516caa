"""The table of `testbed comm`, in nccl-tests' columns with the backend before them: pure text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from testbed.microbench.bandwidth import BYTES_PER_GB
from testbed.microbench.results import total_wrong
from testbed.records.comm import CommConfig, CommResult

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


def header(config: CommConfig, hosts: Sequence[str], launcher: str) -> str:
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
        "#",
    ]
    width = backend_width(config)
    for number in (0, 1):
        words = [" ".join(f"{column[number]:>{column[2]}}" for column in COLUMNS)]
        first = "# backend" if number == 0 else "#"
        lines.append(f"{first:<{width}} {words[0]}".rstrip())
    return "\n".join(lines) + "\n"


def backend_width(config: CommConfig) -> int:
    """Characters of the first column."""
    return max(len("# backend"), *(len(name) + 2 for name in config.backend))


def row(config: CommConfig, result: CommResult) -> str:
    """One line; a reduction has a `redop`, a gather or broadcast none, as in nccl-tests."""
    wrong = "N/A" if result.num_wrong is None else str(result.num_wrong)
    cells = (
        str(result.num_bytes),
        str(result.count),
        result.dtype,
        "sum" if result.op in ("sum", "fold-spread") else "none",
        f"{result.time_s * 1e6:.2f}",
        _gigabytes(result.algbw_bytes_per_s),
        _gigabytes(result.busbw_bytes_per_s),
        wrong,
    )
    words = " ".join(f"{cell:>{column[2]}}" for cell, column in zip(cells, COLUMNS, strict=True))
    return f"{'  ' + result.backend:<{backend_width(config)}} {words}\n"


def footer(config: CommConfig, results: Sequence[CommResult]) -> str:
    """The number of wrong elements, and the mean busbw of all rows and of each backend."""
    wrong = total_wrong(results)
    average = _average(results)
    lines = [
        f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}",
        f"# Avg bus bandwidth    : {average}",
    ]
    if len(config.backend) > 1:
        width = max(len(name) for name in config.backend)
        for name in config.backend:
            own = [result for result in results if result.backend == name]
            lines.append(f"#   {name:<{width}} : {_average(own)}")
    return "\n".join(lines) + "\n"


def _average(results: Sequence[CommResult]) -> str:
    return _gigabytes(statistics.fmean(result.busbw_bytes_per_s for result in results))


def _gigabytes(bytes_per_s: float) -> str:
    value = bytes_per_s / BYTES_PER_GB
    return f"{value:.2f}" if value >= 100 else f"{value:.3f}"
