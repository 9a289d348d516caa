"""Which cells run once more because their host disturbed them, and which of two runs counts."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec

from testbed.base.units import format_seconds
from testbed.noise.steal_time import TOO_MUCH, lost_of
from testbed.records.cell import Cell

# Runs that the host of a virtual machine disturbed are run once more.
#
# Which are, and which of the two runs counts, is decided by the stolen time alone, never by what
# was measured: else a sweep would choose its results. Steps that do not count for what the host
# took during them (see `steady_steps`) do not count here either: a burst that spared enough
# steps is no reason to run again. It still favours some cells: the host can take only from cores
# that want to work, so that cells that keep them busy are repeated more easily than cells that
# mostly wait; and a repeated cell had two chances of a quiet minute. So a report names every cell
# that was repeated, with what both of its runs measured.


def to_repeat(cells: Mapping[str, Cell], repeated: Collection[str], most: int) -> list[str]:
    """Keys of the runs to repeat, the most disturbed first.

    Args:
        cells: key -> what was measured; failed ones are no candidates.
        repeated: keys of runs that were repeated before; they are not repeated again, and count.
        most: how many runs of the sweep may be repeated.

    Example:
        >>> from testbed.base.config import RunConfig
        >>> def cell(stolen: float) -> Cell:
        ...     return Cell(backend="gloo", workload="w", num_workers=2, config=RunConfig(),
        ...                 cores_stolen=stolen)
        >>> to_repeat({"a": cell(0.04), "b": cell(0.001), "c": cell(0.2)}, (), most=5)
        ['c', 'a']
    """
    stolen = {key: lost_of(cell) or 0.0 for key, cell in cells.items() if cell.status == "ok"}
    candidates = [key for key in stolen if stolen[key] >= TOO_MUCH and key not in repeated]
    left = max(0, most - len(repeated))
    return sorted(candidates, key=lambda key: -stolen[key])[:left]


def choose(first: Cell, second: Cell) -> tuple[Cell, Cell]:
    """The run that counts and the other: the second only if it lost less for certain.

    The one that counts tells so in `Cell.again`.
    """
    lost, lost_then = lost_of(first), lost_of(second)
    known = lost is not None and lost_then is not None
    if second.status == "ok" and known and (lost_then or 0.0) < (lost or 0.0):
        return _told("second", second, first), first
    return _told("first", first, second), second


def _told(which: str, counting: Cell, other: Cell) -> Cell:
    if other.status == "failed":
        return msgspec.structs.replace(counting, again="first of two runs; the second failed")
    words = (
        f"{which} of two runs; of what counts others took {_share(counting)}; of the other's "
        f"{_share(other)}, and it measured {_measured(other)}"
    )
    return msgspec.structs.replace(counting, again=words)


def _share(cell: Cell) -> str:
    lost = lost_of(cell)
    return "an unknown share" if lost is None else f"{100 * lost:.1f} %"


def _measured(cell: Cell) -> str:
    """A run's step time and the prediction for it, undilated."""
    if cell.step_time_s is None:
        return "nothing"
    words = f"{cell.step_time_s / cell.dilation * 1e3:.1f} ms"
    if cell.predicted_step_time_s is not None:
        words += f" (predicted {cell.predicted_step_time_s / cell.dilation * 1e3:.1f})"
    return words


@dataclass(frozen=True)
class TimeLeft:
    """What is left for runs again.

    Attributes:
        began_s: when the sweep began, or what goes on with it.
        within_min: minutes from there; None = without end.
        longest_s: of the runs since then; each run again is taken to need as much, so that slow
            cells have the same chance as fast ones. 0 before the first one: that one may be late.
    """

    began_s: float
    within_min: float | None
    longest_s: float

    def suffices(self) -> bool:
        """Whether another run will be done."""
        if self.within_min is None:
            return True
        return time.monotonic() + self.longest_s <= self.began_s + 60 * self.within_min


def why_no_more(num_left: int, left: TimeLeft) -> str:
    """What is told when the time for runs again is over with so many left."""
    return (
        f"{num_left} of them not: after {left.within_min:g} minutes none may be at work, and one "
        f"takes up to {format_seconds(left.longest_s)}; again with --resume"
    )


def why_none(num_repeated: int, max_again: int) -> str:
    """What is told where nothing is run again."""
    if num_repeated >= max_again:
        return f"{num_repeated} runs were run again before: no more than {max_again} may be"
    return (
        f"no other run lost {100 * TOO_MUCH:.0f} % of the cores' time or more of what counts to "
        "the host of this virtual machine: none is run again"
    )
