"""`testbed.simulation/1`: what schedulers are predicted to do with a trace on a link."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from testbed.prediction.factors import Factors
from testbed.prediction.timeline import Span, Timeline
from testbed.records.compressed import CompressedResult, CompressorPays
from testbed.records.text import aligned, time_text

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
            iteration_s=predicted.iteration_s,
            exposed_s=predicted.exposed_s,
            lower_bound_s=predicted.lower_bound_s,
            num_workers=num_workers,
            scaling_factor=scaling,
            speedup=num_workers * scaling,
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
        return cls(
            scheduler=scheduler,
            num_workers=num_workers,
            iteration_s=found.iteration_s,
            scaling_factor=found.scaling_factor,
            startup_s=found.startup_s,
            bandwidth_s=found.bandwidth_s,
            head_delay_s=found.head_delay_s,
            tail_s=found.tail_s,
            slowdown_s=found.slowdown_s,
        )


class Simulation(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one `testbed simulate`.

    Attributes:
        results: by number of workers, then in the order in which schedulers were named.
        break_even: where asked for.
        factors: where asked for.
        compressed: every scheduler under every compressor, where asked for.
        pays: below which bandwidth each compressor does, with `break_even`.
    """

    schema: Literal["testbed.simulation/1"] = SIMULATION_SCHEMA
    results: tuple[SimulationResult, ...]
    break_even: tuple[BreakEven, ...] | msgspec.UnsetType = msgspec.UNSET
    factors: tuple[FactorsOf, ...] | msgspec.UnsetType = msgspec.UNSET
    compressed: tuple[CompressedResult, ...] | msgspec.UnsetType = msgspec.UNSET
    pays: tuple[CompressorPays, ...] | msgspec.UnsetType = msgspec.UNSET


def simulation_table(results: Sequence[SimulationResult]) -> str:
    """One line per scheduler, fastest first."""
    rows = [("scheduler", "messages", "iteration", "exposed", "above bound", "scaling")]
    for result in sorted(results, key=lambda r: r.iteration_s):
        exposed = "crosses" if result.exposed_s is None else time_text(result.exposed_s)
        bound_s = result.lower_bound_s
        above = f"{result.iteration_s / bound_s - 1:.1%}" if bound_s > 0 else "-"
        count = str(result.num_messages)
        scaling = f"{result.scaling_factor:.3f}"
        rows.append(
            (result.scheduler, count, time_text(result.iteration_s), exposed, above, scaling)
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
    times_s = {result.scheduler: result.iteration_s for result in results}
    if times_s.get("optimal", 0.0) > min(times_s.values(), default=0.0):
        notes.append(
            "optimal: of whole messages, one at a time, within the iteration; those before it send "
            "several at once, in halves or by priority"
        )
    return notes
