"""Cells as pytest-benchmark's JSON: what its `compare`, and services that read its files, take."""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from testbed.base.axes import AXES, WORKLOADS
from testbed.base.config import identity, to_arguments
from testbed.records.report import Report, ReportCell
from testbed.reporting.naming import part_of
from testbed.statistics.summary import quantile


def to_benchmark(report: Report) -> str:
    """Each finished cell as a benchmark: a round is a repeat, its time the median step of it.

    Cells of the same workload, workers and cluster are a group. The full name is the command's
    options, equal for the same cell of two sweeps. Times are those of the emulated cluster.

    Args:
        report: with the times of the clusters that were emulated (`formats.as_shown`).
    """
    cells = [cell for cell in report.cells if cell.run_medians_s]
    environment = cells[0].environment if cells else {}
    commit, _, dirty = str(environment.get("commit") or "unversioned").partition("-dirty")
    machine = ("hosts", "platform", "cpu", "gpu", "num_cores", "memory_bytes", "versions")
    document = {
        "machine_info": {key: environment.get(key) for key in machine},
        "commit_info": {"id": commit, "dirty": dirty != "" or commit == "unversioned"},
        "benchmarks": [_benchmark(cell) for cell in cells],
        "version": "testbed.report/1",
    }
    return json.dumps(document, indent=1) + "\n"


def _benchmark(cell: ReportCell) -> dict[str, Any]:
    cluster = f" on {cell.config.cluster}" if cell.config.cluster else ""
    parts = {axis.what: part_of(cell, axis) for axis in AXES}
    chosen = {axis.what for axis in AXES if axis.shown or not axis.is_default(cell.config)}
    named = [text for what, text in parts.items() if what in chosen and what != WORKLOADS.what]
    of_ranks, n = cell.samples.exposed_comm_by_rank_s, cell.num_workers
    least_s = [min(of_ranks[i : i + n]) for i in range(0, len(of_ranks), n)]  # of each run
    return {
        "group": f"{cell.workload}, {cell.num_workers} workers{cluster}",
        "name": "/".join(named),
        "fullname": shlex.join(["testbed", "run", *to_arguments(cell.config)]),
        "params": parts,
        "param": "-".join(named),
        "extra_info": {
            "ranks": cell.num_workers,
            "wire_bytes_per_step": cell.wire_bytes_per_step,
            "samples_per_s": cell.samples_per_s,
            "exposed_comm_s": cell.exposed_comm_s,
            "cross_rank_min_exposed_s": (
                statistics.median(least_s) / cell.dilation if least_s else None
            ),
            "counted_steps": cell.counted_steps,
            "dilation": cell.dilation,
            "configuration": msgspec.to_builtins(identity(cell.config)),
        },
        "options": {"timer": "median step of a run", "min_rounds": cell.repeats},
        "stats": stats_of([time_s / cell.dilation for time_s in cell.run_medians_s]),
    }


def stats_of(data: Sequence[float]) -> dict[str, Any]:
    """The figures of a benchmark, by pytest-benchmark's names; quartiles are linear ones.

    Args:
        data: seconds of each round, at least one.

    Example:
        >>> found = stats_of([1.0, 2.0, 3.0, 10.0])
        >>> found["median"], found["iqr"], found["iqr_outliers"], found["hd15iqr"]
        (2.5, 3.0, 1, 3.0)
    """
    mean, stddev = statistics.fmean(data), statistics.stdev(data) if len(data) > 1 else 0.0
    q1, q3 = quantile(data, 0.25), quantile(data, 0.75)
    low, high = q1 - 1.5 * (q3 - q1), q3 + 1.5 * (q3 - q1)
    inside = [value for value in data if low <= value <= high]
    far = sum(not mean - stddev <= value <= mean + stddev for value in data)
    return {
        "min": min(data),
        "max": max(data),
        "mean": mean,
        "stddev": stddev,
        "rounds": len(data),
        "median": statistics.median(data),
        "iqr": q3 - q1,
        "q1": q1,
        "q3": q3,
        "iqr_outliers": len(data) - len(inside),
        "stddev_outliers": far,
        "outliers": f"{far};{len(data) - len(inside)}",
        "ld15iqr": min(inside),
        "hd15iqr": max(inside),
        "ops": 1 / mean,
        "total": sum(data),
        "data": list(data),
        "iterations": 1,
    }
