"""Runs that the host of a virtual machine disturbed are run once more.

Which are, and which of the two runs counts, is decided by the stolen time alone: never by what was
measured, or a sweep would choose its results.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from testbed.records.cell import Cell
from testbed.records.disturbed import TOO_MUCH, stolen_of
from testbed.records.store import Store


def to_repeat(cells: Mapping[str, Cell], repeated: Collection[str], most: int) -> list[str]:
    """Keys of the runs to repeat, the most disturbed first.

    Args:
        cells: key -> what was measured; failed ones are no candidates.
        repeated: keys of runs that were repeated before; they are not repeated again, and count.
        most: how many runs of the sweep may be repeated.

    Example:
        >>> from testbed.config import RunConfig
        >>> def cell(stolen: float) -> Cell:
        ...     return Cell(backend="gloo", workload="w", num_workers=2, config=RunConfig(),
        ...                 cores_stolen=stolen)
        >>> to_repeat({"a": cell(0.04), "b": cell(0.001), "c": cell(0.2)}, (), most=5)
        ['c', 'a']
    """
    stolen = {key: stolen_of(cell) or 0.0 for key, cell in cells.items() if cell.status == "ok"}
    candidates = [key for key in stolen if stolen[key] >= TOO_MUCH and key not in repeated]
    left = max(0, most - len(repeated))
    return sorted(candidates, key=lambda key: -stolen[key])[:left]


def better_of(first: Cell, second: Cell) -> Cell:
    """The one of two runs of a cell that counts: finished, and with less stolen time."""
    if second.status != "ok":
        return first
    return min(first, second, key=lambda cell: stolen_of(cell) or 0.0)


def settle(store: Store) -> set[str]:
    """Let of each repeated run the better one count; the keys of those that were repeated.

    Also after a sweep that was killed between two writes.
    """
    repeated = set()
    for key, (first, second) in store.repeated().items():
        store.write_cell(key, better_of(first, second))
        repeated.add(key)
    return repeated
