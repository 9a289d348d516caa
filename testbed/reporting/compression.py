"""Below which bandwidth each compressor should pay on what was measured, and whether it did."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from testbed.base.axes import COMPRESSORS, SCHEDULERS
from testbed.base.config import RunConfig
from testbed.prediction.break_even import MIN_GAIN, Pays, break_even_between, highest_break_even
from testbed.records.report import CompressionVerdict, CompressorBreakEven, ReportCell
from testbed.records.text import rate_text
from testbed.reporting.work import sharing_of, undilated

BACKWARD = 2 / 3  # share of compute that is the backward pass, as FLOPs have it
# Rates at which something pays, as words; those of `below` are the rate's own.
PAYS_TEXTS = {"every": "every rate", "none": "no rate", "unclear": "some rates"}

# What does not make other work of it.
_FREE = ("scheduler", "compressor", "predict", "trace", "link", "plan", "repeat", "learning_rate")
_ALSO_FREE = ("momentum", "deadline", "start_deadline", "verify_steps")


@dataclass(frozen=True)
class Bulk:
    """A step as a bulk of bytes and seconds, told apart by what bandwidth changes.

    Attributes:
        compute_s: of the step.
        startup_s: of all messages.
        wire_bytes: through the busiest interface, the larger direction.
        encode_s: of all messages.
        decode_s: of all messages.
        num_messages: K.
        hides: whether messages travel during backward.
    """

    compute_s: float
    startup_s: float
    wire_bytes: float
    encode_s: float = 0.0
    decode_s: float = 0.0
    num_messages: int = 1
    hides: bool = True

    def step_s(self, wire_byte_s: float) -> float:
        """Step time where a byte takes the busiest interface so long.

            compute + max(0, longest + (sum - longest) / K - backward)

        over the three stages encode, startup + bytes x wire_byte_s, decode: K messages in a
        pipeline of three stages, behind a backward pass of two thirds of the compute time.

        Example:
            >>> Bulk(compute_s=3.0, startup_s=1.0, wire_bytes=4.0).step_s(1.0)
            6.0
        """
        stages = (self.encode_s, self.startup_s + self.wire_bytes * wire_byte_s, self.decode_s)
        longest = max(stages)
        busy_s = longest + (sum(stages) - longest) / max(1, self.num_messages)
        hidden_s = BACKWARD * self.compute_s if self.hides else 0.0
        return self.compute_s + max(0.0, busy_s - hidden_s)


def compression_verdicts(cells: Sequence[ReportCell]) -> list[CompressionVerdict]:
    """One for each compressed cell that can be judged.

    The model knows the fitted link (start-up and time per byte), what encoding, decoding and
    sending took, and the dense cell's compute time; it does not know either step time. Compared is
    with the fastest dense cell of the same work on the same backend.
    """
    shown = {place: undilated(cell) for place, cell in enumerate(cells) if cell.status == "ok"}
    verdicts = []
    for place, cell in shown.items():
        alike = [other for other in shown.values() if _same(other, cell)]
        dense = min(
            (c for c in alike if c.compression is None and c.step_time_s),
            key=lambda c: c.step_time_s or 0.0,
            default=None,
        )
        verdict = None if dense is None else _verdict(place, cell, dense, _link(cell, dense, alike))
        if verdict is not None:
            verdicts.append(verdict)
    return verdicts


def describe_verdicts(verdicts: Iterable[CompressionVerdict]) -> list[str]:
    """A line for each, and what the model assumes."""
    lines = [_line(v) for v in verdicts]
    if not lines:
        return []
    known = (
        "break-even bandwidths are reckoned from the fitted link and each cell's encoding, sending "
        "and decoding in bulk: three stages in a pipeline behind a backward pass of two thirds of "
        "the compute time; to pay means 1 % or more"
    )
    return [*lines, known]


def _line(verdict: CompressionVerdict) -> str:
    at = rate_text(verdict.link_bits_per_s)
    where = {"any": "at any bandwidth", "never": "at no bandwidth"}.get(verdict.pays)
    if verdict.below_bits_per_s is not None:
        where = f"below {rate_text(verdict.below_bits_per_s)}"
    agrees = "agrees" if verdict.agrees else "does not agree"
    return (
        f"{verdict.workload}/{verdict.backend}/{verdict.num_workers}, {verdict.scheduler}: "
        f"{verdict.compressor} should pay {where}; the link has {at}: predicted "
        f"{verdict.predicted_gain:+.0%}, measured {verdict.measured_gain:+.0%}, which {agrees}"
    ).replace("%", " %")


def work_of(cell: ReportCell) -> dict[str, Any]:
    """The settings that tell one piece of work from another; how it is exchanged is left out."""
    values = msgspec.structs.asdict(cell.config)
    return {k: v for k, v in values.items() if k not in _FREE + _ALSO_FREE}


def _same(one: ReportCell, other: ReportCell) -> bool:
    """Whether they did the same work in the same sweep."""
    return one.source == other.source and work_of(one) == work_of(other)


def _link(
    cell: ReportCell, dense: ReportCell, alike: Sequence[ReportCell]
) -> dict[str, Any] | None:
    """The link of the dense cell, whose messages show it best, the cell's own, or another's."""
    return next((c.link for c in (dense, cell, *alike) if c.link is not None), None)


def _verdict(
    place: int, cell: ReportCell, dense: ReportCell, link: dict[str, Any] | None
) -> CompressionVerdict | None:
    """None where something was not measured."""
    found = cell.compression
    wires = [_wire_bytes(each) for each in (cell, dense)]
    if found is None or link is None or not cell.step_time_s or not dense.step_time_s:
        return None
    if dense.compute_s is None or not wires[1] or not found.dense_bytes:
        return None
    # A byte of a dense message puts wires[1] / dense_bytes bytes on the busiest interface.
    wire_byte_s = float(link["seconds_per_byte"]) * found.dense_bytes / wires[1]
    if wire_byte_s <= 0:
        return None
    count = dense.num_messages or 1
    plain = Bulk(
        dense.compute_s,
        count * float(link["latency_s"]),
        wires[1],
        num_messages=count,
        hides=_hides(dense),
    )
    own = Bulk(
        dense.compute_s,
        max(0.0, found.communication_s - wires[0] * wire_byte_s),
        wires[0],
        found.encode_s,
        found.decode_s,
        cell.num_messages or 1,
        hides=_hides(cell),
    )

    def gain(factor: float) -> float:
        return plain.step_s(wire_byte_s / factor) / own.step_s(wire_byte_s / factor) - 1

    highest = highest_break_even(gain)
    below = 0 < highest < float("inf")
    link_bits_per_s = 8 / wire_byte_s
    predicted, measured = gain(1.0), dense.step_time_s / cell.step_time_s - 1
    return CompressionVerdict(
        place=place,
        compressor=found.compressor,
        workload=cell.workload,
        backend=cell.backend,
        scheduler=cell.scheduler,
        num_workers=cell.num_workers,
        pays="below" if below else "any" if highest else "never",
        below_bits_per_s=highest * link_bits_per_s if below else None,
        link_bits_per_s=link_bits_per_s,
        predicted_gain=predicted,
        measured_gain=measured,
        agrees=(predicted >= MIN_GAIN) == (measured >= MIN_GAIN),
    )


def _hides(cell: ReportCell) -> bool:
    """Whether messages travel during backward; they do where nobody knows the scheduler."""
    found = SCHEDULERS.find(cell.scheduler)
    return found is None or found.facts.overlaps


def _wire_bytes(cell: ReportCell) -> float:
    return max(cell.wire_bytes_per_step or 0.0, cell.received_bytes_per_step or 0.0)


# From which emulated rate down compressors pay: measured, as predicted cell by cell, as foreseen.

_LINK_KEYS = ("up_bps", "down_bps")
_Time = Callable[[ReportCell], float | None]


@dataclass(frozen=True)
class _Where:
    """What is alike in the cells of one break-even; `work`: all settings but the cluster's rate."""

    workload: str
    backend: str
    num_workers: int
    cluster: str
    work: str
    source: str


def break_evens(
    cells: Sequence[ReportCell], held_out_s: Mapping[RunConfig, float]
) -> list[CompressorBreakEven]:
    """One for each compressor whose cells, and dense ones, ran at two rates or more.

    At each rate the fastest scheduler counts, of dense and of compressed cells alike. A step is
    taken to be linear in the time of a byte between two rates that were measured. Clusters count
    whose links are all alike.

    Args:
        cells: `Report.cells`.
        held_out_s: step times of a forecast, see `reporting.forecast.Compared`; empty: none.
    """
    found: dict[_Where, dict[str, dict[float, list[ReportCell]]]] = {}
    for cell in map(undilated, cells):
        rate = _rate_bps(cell.cluster)
        if cell.status == "ok" and cell.step_time_s and rate is not None:
            by_compressor = found.setdefault(_where(cell), {})
            by_rate = by_compressor.setdefault(cell.config.compressor, {})
            by_rate.setdefault(rate, []).append(cell)
    return [
        _break_even(where, compressor, by_compressor[COMPRESSORS.default], by_rate, held_out_s)
        for where, by_compressor in found.items()
        if COMPRESSORS.default in by_compressor
        for compressor, by_rate in by_compressor.items()
        if compressor != COMPRESSORS.default
        and len(by_rate.keys() & by_compressor[COMPRESSORS.default].keys()) > 1
    ]


def describe_break_evens(found: Iterable[CompressorBreakEven]) -> list[str]:
    """A line for each."""
    return [_break_even_line(each) for each in found]


def _break_even_line(each: CompressorBreakEven) -> str:
    words = (
        f"{each.workload}/{each.backend}/{each.num_workers}: {each.compressor} pays "
        f"{pays_text(each.measured, each.measured_bits_per_s, each.rates_bits_per_s)} as measured, "
        f"{pays_text(each.predicted, each.predicted_bits_per_s, each.rates_bits_per_s)} "
        f"as predicted{_off(each.predicted_bits_per_s, each.measured_bits_per_s)}"
    )
    if each.foreseen is None:
        return words
    return (
        f"{words}, {pays_text(each.foreseen, each.foreseen_bits_per_s, each.rates_bits_per_s)} "
        f"as the forecast has it{_off(each.foreseen_bits_per_s, each.measured_bits_per_s)}"
    )


def _off(told: float | None, measured: float | None) -> str:
    if told is None or measured is None:
        return ""
    return f" ({told / measured - 1:+.1%})".replace("%", " %")


def pays_text(pays: Pays | None, bits_per_s: float | None, rates: tuple[float, float]) -> str:
    """At which rates it pays, for a sentence: `(it pays) below 971 Mbit/s`.

    Args:
        pays: see `break_even_between`; None: unknown.
        bits_per_s: where it begins, if `below`.
        rates: lowest and highest that were looked at, bit/s.

    Example:
        >>> pays_text("below", 9.71e8, (4e8, 1.3e9)), pays_text("every", None, (4e8, 1.3e9))
        ('below 971 Mbit/s', 'at every rate from 400 Mbit/s to 1.3 Gbit/s')
    """
    if bits_per_s is not None:
        return f"below {rate_text(bits_per_s)}"
    between = "from {} to {}".format(*map(rate_text, rates))
    return f"at {PAYS_TEXTS.get(pays or '', 'unknown rates')} {between}"


def _break_even(
    where: _Where,
    compressor: str,
    dense: Mapping[float, list[ReportCell]],
    own: Mapping[float, list[ReportCell]],
    held_out_s: Mapping[RunConfig, float],
) -> CompressorBreakEven:
    rates = sorted(dense.keys() & own.keys())

    def place(time_s: _Time) -> tuple[Pays | None, float | None]:
        sides = [_least(dense, time_s), _least(own, time_s)]
        known = sides[0].keys() & sides[1].keys()
        pays, bits_per_s = break_even_between(*sides) if known else (None, None)
        return (pays if bits_per_s or len(known) == len(rates) else None), bits_per_s

    def foresee(cell: ReportCell) -> float | None:  # dilated; a factor of all times moves no rate
        return held_out_s.get(msgspec.structs.replace(cell.config, repeat=0))

    measured, measured_bits_per_s = place(lambda cell: cell.step_time_s)
    predicted, predicted_bits_per_s = place(lambda cell: cell.predicted_step_time_s)
    foreseen, foreseen_bits_per_s = place(foresee)
    return CompressorBreakEven(
        compressor=compressor,
        workload=where.workload,
        backend=where.backend,
        num_workers=where.num_workers,
        cluster=where.cluster,
        rates_bits_per_s=(rates[0], rates[-1]),
        measured=measured,
        measured_bits_per_s=measured_bits_per_s,
        predicted=predicted,
        predicted_bits_per_s=predicted_bits_per_s,
        foreseen=foreseen,
        foreseen_bits_per_s=foreseen_bits_per_s,
    )


def _least(cells: Mapping[float, list[ReportCell]], time_s: _Time) -> dict[float, float]:
    """Of the cells at each rate the least time that is known."""
    known = [(rate, t) for rate, of in cells.items() for c in of if (t := time_s(c)) is not None]
    return {rate: min(t for r, t in known if r == rate) for rate, _ in known}


def _where(cell: ReportCell) -> _Where:
    spec = str((cell.cluster or {}).get("spec", ""))
    rest = ",".join(part for part in spec.split(",") if not part.startswith("rate="))
    same = {"cluster": rest, "sharing": sharing_of(cell.cluster)}
    work = repr(sorted((work_of(cell) | same).items()))
    return _Where(cell.workload, cell.backend, cell.num_workers, rest, work, cell.source)


def _rate_bps(cluster: Mapping[str, Any] | None) -> float | None:
    """The rate of all links; None without a cluster, or where they differ or change."""
    if cluster is None or cluster.get("changes"):
        return None
    rates = {float(link[key]) for link in cluster.get("links", ()) for key in _LINK_KEYS}
    return rates.pop() if len(rates) == 1 else None
