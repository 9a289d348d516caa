"""`testbed.simulation/1`: what schedulers are predicted to do with a trace on a link."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from testbed.prediction.timeline import Span, Timeline
from testbed.units import format_seconds

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
        lower_bound_s: max(forward + backward, total bytes x seconds_per_byte).
    """

    scheduler: str
    num_messages: int
    messages: tuple[Span, ...]
    iteration_s: float
    exposed_s: float | None
    lower_bound_s: float

    @classmethod
    def of(cls, scheduler: str, predicted: Timeline) -> SimulationResult:
        """The record of a timeline."""
        return cls(
            scheduler=scheduler,
            num_messages=len(predicted.spans),
            messages=predicted.spans,
            iteration_s=predicted.iteration_s,
            exposed_s=predicted.exposed_s,
            lower_bound_s=predicted.lower_bound_s,
        )


class Simulation(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one `testbed simulate`, in the order in which schedulers were named."""

    schema: Literal["testbed.simulation/1"] = SIMULATION_SCHEMA
    results: tuple[SimulationResult, ...]


def encode_simulation(simulation: Simulation) -> bytes:
    """The simulation as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(simulation), indent=1) + b"\n"


def decode_simulation(data: bytes) -> Simulation:
    """A simulation from JSON.

    Raises:
        msgspec.ValidationError: the JSON is no `testbed.simulation/1`; the message names the key.
    """
    return msgspec.json.decode(data, type=Simulation)


def simulation_table(results: Sequence[SimulationResult]) -> str:
    """One line per scheduler, fastest first."""
    head = ("scheduler", "messages", "iteration", "exposed", "above bound")
    rows = [head]
    for result in sorted(results, key=lambda r: r.iteration_s):
        exposed = "crosses" if result.exposed_s is None else _time(result.exposed_s)
        bound_s = result.lower_bound_s
        above = f"{result.iteration_s / bound_s - 1:.1%}" if bound_s > 0 else "-"
        count = str(result.num_messages)
        rows.append((result.scheduler, count, _time(result.iteration_s), exposed, above))
    widths = [max(len(row[c]) for row in rows) for c in range(len(head))]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(widths[c]) for c, cell in enumerate(row) if c)]
        )
        for row in rows
    )


def _time(seconds: float) -> str:
    return "0 s" if seconds <= 0 else format_seconds(seconds)
