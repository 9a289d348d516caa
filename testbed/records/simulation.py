"""`testbed.simulation/1`: what schedulers are predicted to do with a trace on a link."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import msgspec

from testbed.base.axes import SCHEDULERS
from testbed.base.units import format_bytes, format_seconds
from testbed.prediction.compressed import CompressedTimeline
from testbed.prediction.factors import Factors
from testbed.prediction.timeline import Span, Timeline
from testbed.records.text import aligned, rate_text


def _shared(record: type[msgspec.Struct], predicted: object) -> dict[str, Any]:
    """What a record holds under the same names as the prediction that it is made of."""
    names = record.__struct_fields__
    return {name: getattr(predicted, name) for name in names if hasattr(predicted, name)}


# What compressors are predicted to cost and to gain.


class CompressedResult(msgspec.Struct, frozen=True, kw_only=True):
    """One scheduler's plan under one compressor; seconds and bytes of one rank and iteration.

    Attributes:
        compressor: specification.
        scheduler: specification.
        num_workers: n.
        iteration_s: steady-state time of one whole iteration.
        exposed_s: end of the last decoding minus end of backward; null for schedulers that cross
            the iteration boundary.
        encode_s: sum over messages.
        communication_s: while any message is under way; several at once count once.
        decode_s: sum over messages.
        sent_bytes: payload handed over.
        dense_bytes: of the gradients.
        speedup: time of the best dense schedule over this one's.
    """

    compressor: str
    scheduler: str
    num_workers: int
    iteration_s: float
    exposed_s: float | None
    encode_s: float
    communication_s: float
    decode_s: float
    sent_bytes: float
    dense_bytes: int
    speedup: float

    @classmethod
    def of(
        cls,
        compressor: str,
        scheduler: str,
        num_workers: int,
        found: CompressedTimeline,
        dense_s: float,
    ) -> CompressedResult:
        """The record of a timeline; `dense_s` is the best dense schedule's iteration."""
        return cls(
            compressor=compressor,
            scheduler=scheduler,
            num_workers=num_workers,
            speedup=dense_s / found.iteration_s if found.iteration_s > 0 else 1.0,
            **_shared(cls, found),
        )


class CompressorPays(msgspec.Struct, frozen=True, kw_only=True):
    """Below which bandwidth a compressor gains 1 % or more on the best dense schedule.

    Attributes:
        compressor: specification.
        num_workers: n.
        scheduler: the best one under it at the link's bandwidth.
        dense_scheduler: the best one of dense messages there.
        gain: time of the best dense schedule over the best under the compressor, less 1.
        pays: `below` a bandwidth, at `any` one looked at, or `never`.
        seconds_per_byte: of a dense message; with more than this it pays; null unless `below`.
    """

    compressor: str
    num_workers: int
    scheduler: str
    dense_scheduler: str
    gain: float
    pays: str
    seconds_per_byte: float | None


def compressed_table(results: Sequence[CompressedResult]) -> str:
    """One line per compressor, scheduler and number of workers, the fastest first."""
    rows = [
        (
            *("compressor", "scheduler", "workers", "iteration", "exposed", "encode"),
            *("communicate", "decode", "sent", "of", "to best dense"),
        )
    ]
    for each in sorted(results, key=lambda r: (r.num_workers, r.iteration_s)):
        rows.append(
            (
                each.compressor,
                each.scheduler,
                str(each.num_workers),
                format_seconds(each.iteration_s),
                "crosses" if each.exposed_s is None else format_seconds(each.exposed_s),
                format_seconds(each.encode_s),
                format_seconds(each.communication_s),
                format_seconds(each.decode_s),
                format_bytes(round(each.sent_bytes)),
                format_bytes(each.dense_bytes),
                f"{each.speedup:.2f} x",
            )
        )
    return aligned(rows)


def pays_table(
    found: Sequence[CompressorPays], bits_per_s: Callable[[int, float], float], note: str
) -> str:
    """One line per compressor and number of workers.

    Args:
        found: to be shown.
        bits_per_s: of each network interface, from the number of workers and the time per byte.
        note: what compressing is taken to cost.
    """
    rows = [("pays", "workers", "below", "at this bandwidth", "with", "best dense")]
    for each in found:
        below = each.pays
        if each.seconds_per_byte is not None:
            below = rate_text(bits_per_s(each.num_workers, each.seconds_per_byte))
        rows.append(
            (
                each.compressor,
                str(each.num_workers),
                below,
                f"{each.gain:+.1%}",
                each.scheduler,
                each.dense_scheduler,
            )
        )
    return (
        aligned(rows)
        + "\n(bandwidth of each interface below which the best schedule under a compressor is 1 % "
        f"or more faster than the best\nschedule of dense messages. {note})"
    )


SIMULATION_SCHEMA: Final = "testbed.simulation/1"


class SimulationResult(msgspec.Struct, frozen=True, kw_only=True):
    """One scheduler's plan as it is predicted to run; all times in seconds.

    Attributes:
        scheduler: specification, as given.
        num_messages: length of `messages`.
        messages: in the plan's order, times from the start of backward. A message that is sent in
            halves (`dear`) is there twice, its fold and later its spread, with half of its bytes
            each, so that the sizes of all messages add up to the gradients'.
        iteration_s: steady-state time of one whole iteration.
        exposed_s: end of the last message minus end of backward; null for schedulers that cross the
            iteration boundary.
        lower_bound_s: max(forward + backward, total bytes x seconds_per_byte); of a link with
            `pieces` the smallest seconds_per_byte of them, so that it stays a bound; with one
            worker forward + backward.
        num_workers: n, of the link.
        scaling_factor: time of one worker alone over `iteration_s`: throughput of n workers over n
            times that of one.
        speedup: n times the scaling factor.
    """

    scheduler: str
    num_messages: int
    messages: tuple[Span, ...]
    iteration_s: float
    exposed_s: float | None
    lower_bound_s: float
    num_workers: int
    scaling_factor: float
    speedup: float

    @classmethod
    def of(
        cls, scheduler: str, predicted: Timeline, num_workers: int, alone_s: float
    ) -> SimulationResult:
        """The record of a timeline; `alone_s` is what one worker takes for an iteration."""
        scaling = alone_s / predicted.iteration_s if predicted.iteration_s > 0 else 1.0
        return cls(
            scheduler=scheduler,
            num_messages=len(predicted.spans),
            messages=predicted.spans,
            num_workers=num_workers,
            scaling_factor=scaling,
            speedup=num_workers * scaling,
            **_shared(cls, predicted),
        )


class BreakEven(msgspec.Struct, frozen=True, kw_only=True):
    """Between which bandwidths a scheduler gains 1 % or more on the best plain one.

    Attributes:
        scheduler: specification.
        num_workers: of the link.
        best_gain: largest time of the best plain one over this one's, less 1.
        best_seconds_per_byte: time per byte of a message where that is so.
        slowest_seconds_per_byte: with more time per byte than this it gains less; null = it gains
            at the lowest bandwidth looked at, or nowhere.
        fastest_seconds_per_byte: with less time per byte likewise.
    """

    scheduler: str
    num_workers: int
    best_gain: float
    best_seconds_per_byte: float
    slowest_seconds_per_byte: float | None
    fastest_seconds_per_byte: float | None


class FactorsOf(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of an iteration that would not be there without one factor, all else as it is.

    Attributes are those of `testbed.prediction.factors.Factors`.
    """

    scheduler: str
    num_workers: int
    iteration_s: float
    scaling_factor: float
    startup_s: float
    bandwidth_s: float
    head_delay_s: float
    tail_s: float
    slowdown_s: float

    @classmethod
    def of(cls, scheduler: str, num_workers: int, found: Factors) -> FactorsOf:
        """The record of one scheduler's factors."""
        return cls(scheduler=scheduler, num_workers=num_workers, **_shared(cls, found))


class Simulation(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one `testbed simulate`.

    Attributes:
        prediction: what kind all of it is: `null` on a link of nominal numbers, `held-out` on one
            from a file.
        results: by number of workers, then in the order in which schedulers were named.
        break_even: where asked for.
        factors: where asked for.
        compressed: every scheduler under every compressor, where asked for.
        pays: below which bandwidth each compressor does, with `break_even`.
    """

    schema: Literal["testbed.simulation/1"] = SIMULATION_SCHEMA
    prediction: Literal["null", "held-out"] = "held-out"
    results: tuple[SimulationResult, ...]
    break_even: tuple[BreakEven, ...] | msgspec.UnsetType = msgspec.UNSET
    factors: tuple[FactorsOf, ...] | msgspec.UnsetType = msgspec.UNSET
    compressed: tuple[CompressedResult, ...] | msgspec.UnsetType = msgspec.UNSET
    pays: tuple[CompressorPays, ...] | msgspec.UnsetType = msgspec.UNSET


def simulation_table(results: Sequence[SimulationResult]) -> str:
    """One line per scheduler, fastest first."""
    rows = [("scheduler", "messages", "iteration", "exposed", "above bound", "scaling")]
    for result in sorted(results, key=lambda r: r.iteration_s):
        exposed = "crosses" if result.exposed_s is None else format_seconds(result.exposed_s)
        bound_s = result.lower_bound_s
        above = f"{result.iteration_s / bound_s - 1:.1%}" if bound_s > 0 else "-"
        count = str(result.num_messages)
        scaling = f"{result.scaling_factor:.3f}"
        rows.append(
            (result.scheduler, count, format_seconds(result.iteration_s), exposed, above, scaling)
        )
    return "\n".join([aligned(rows), *_notes(results)])


def _notes(results: Sequence[SimulationResult]) -> list[str]:
    """What the table's words mean, where they stand in it."""
    notes = [
        "exposed: of communication, behind backward; above bound: iteration over the longer of "
        "compute and all bytes at the link's rate; scaling: speed per worker over one alone"
    ]
    if any(result.exposed_s is None for result in results):
        notes.append("crosses: messages go on behind the next forward pass, which waits for them")
    fastest_s = min((result.iteration_s for result in results), default=0.0)
    for name in {r.scheduler: None for r in results if r.iteration_s > fastest_s}:
        found = SCHEDULERS.find(name)
        if found is not None and found.facts.outdone:
            notes.append(f"{name}: {found.facts.outdone}")
    return notes
