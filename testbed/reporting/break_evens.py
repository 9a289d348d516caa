"""From which emulated rate down compressors pay: measured, and as predicted cell by cell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from testbed.prediction.worth import crossing
from testbed.records.report import BreakEven, ReportCell
from testbed.records.text import rate_text
from testbed.reporting.compression import work_of
from testbed.reporting.dilation import sharing_of, undilated

_LINK_KEYS = ("up_bps", "down_bps")
_DENSE = "none"


@dataclass(frozen=True)
class _Where:
    """What is alike in the cells of one break-even; `work`: all settings but the cluster's rate."""

    workload: str
    backend: str
    num_workers: int
    cluster: str
    work: str


def break_evens(cells: Sequence[ReportCell]) -> list[BreakEven]:
    """One for each compressor whose cells, and dense ones, ran at two rates or more.

    At each rate the fastest scheduler counts, of dense and of compressed cells alike. A step is
    taken to be linear in the time of a byte between two rates that were measured. Clusters count
    whose links are all alike.
    """
    found: dict[_Where, dict[str, dict[float, list[ReportCell]]]] = {}
    for cell in map(undilated, cells):
        rate = _rate_bps(cell.cluster)
        if cell.status == "ok" and cell.step_time_s and rate is not None:
            by_compressor = found.setdefault(_where(cell), {})
            by_rate = by_compressor.setdefault(cell.config.compressor, {})
            by_rate.setdefault(rate, []).append(cell)
    return [
        _break_even(where, compressor, by_compressor[_DENSE], by_rate)
        for where, by_compressor in found.items()
        if _DENSE in by_compressor
        for compressor, by_rate in by_compressor.items()
        if compressor != _DENSE and len(by_rate.keys() & by_compressor[_DENSE].keys()) > 1
    ]


def describe_break_evens(found: Iterable[BreakEven]) -> list[str]:
    """A line for each."""
    return [_line(each) for each in found]


def _line(each: BreakEven) -> str:
    words = (
        f"{each.workload}/{each.backend}/{each.num_workers}: {each.compressor} pays "
        f"{_below(each.measured_bits_per_s, each)} as measured, "
        f"{_below(each.predicted_bits_per_s, each)} as predicted"
    )
    if each.measured_bits_per_s is None or each.predicted_bits_per_s is None:
        return words
    return f"{words}, {each.predicted_bits_per_s / each.measured_bits_per_s - 1:+.1%}".replace(
        "%", " %"
    )


def _below(bits_per_s: float | None, each: BreakEven) -> str:
    if bits_per_s is not None:
        return f"below {rate_text(bits_per_s)}"
    lowest, highest = map(rate_text, each.rates_bits_per_s)
    return f"at no single place between {lowest} and {highest}"


def _break_even(
    where: _Where,
    compressor: str,
    dense: Mapping[float, list[ReportCell]],
    own: Mapping[float, list[ReportCell]],
) -> BreakEven:
    rates = sorted(dense.keys() & own.keys())

    def place(name: str) -> float | None:
        points = [(rate, _least(dense[rate], name), _least(own[rate], name)) for rate in rates]
        known = [(8 / rate, a, b) for rate, a, b in points if a is not None and b is not None]
        byte_s = crossing(known)
        return None if byte_s is None else 8 / byte_s

    return BreakEven(
        compressor=compressor,
        workload=where.workload,
        backend=where.backend,
        num_workers=where.num_workers,
        cluster=where.cluster,
        rates_bits_per_s=(rates[0], rates[-1]),
        measured_bits_per_s=place("step_time_s"),
        predicted_bits_per_s=place("predicted_step_time_s"),
    )


def _least(cells: Iterable[ReportCell], name: str) -> float | None:
    return min((time_s for c in cells if (time_s := getattr(c, name)) is not None), default=None)


def _where(cell: ReportCell) -> _Where:
    spec = str((cell.cluster or {}).get("spec", ""))
    rest = ",".join(part for part in spec.split(",") if not part.startswith("rate="))
    same = {"cluster": rest, "sharing": sharing_of(cell.cluster)}
    work = repr(sorted((work_of(cell) | same).items()))
    return _Where(cell.workload, cell.backend, cell.num_workers, rest, work)


def _rate_bps(cluster: Mapping[str, Any] | None) -> float | None:
    """The rate of all links; None without a cluster, or where they differ or change."""
    if cluster is None or cluster.get("changes"):
        return None
    rates = {float(link[key]) for link in cluster.get("links", ()) for key in _LINK_KEYS}
    return rates.pop() if len(rates) == 1 else None
