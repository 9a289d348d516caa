"""What the cores of the machine had to do with the times: too busy, or given to others."""

from __future__ import annotations

from collections.abc import Sequence

from testbed.records.cell import Cell

BUSY = 0.9  # from here on messages wait for cores as well as for the network
STOLEN = 0.01


def core_words(cell: Cell) -> str:
    """How busy the cores were in a cell; empty where that was not recorded.

    Example:
        >>> from testbed.config import RunConfig
        >>> core_words(Cell(backend="gloo", workload="w", num_workers=2, config=RunConfig(),
        ...                 cores_busy=0.5, cores_stolen=0.02))
        '50 % busy, 2.0 % stolen by the host of this virtual machine'
    """
    if cell.cores_busy is None:
        return ""
    words = f"{100 * cell.cores_busy:.0f} % busy"
    if cell.cores_stolen is not None and cell.cores_stolen >= STOLEN:
        words += f", {100 * cell.cores_stolen:.1f} % stolen by the host of this virtual machine"
    if is_core_bound(cell):
        words += "; the time tells of them as well as of the network"
    return words


def is_core_bound(cell: Cell) -> bool:
    """Whether messages alone kept the cores busy: a replayed workload only waits."""
    replayed = cell.data.startswith("replayed")
    return replayed and cell.cores_busy is not None and cell.cores_busy >= BUSY


def describe_cores(cells: Sequence[Cell]) -> list[str]:
    """Notes of a report: which cells the cores held up, and how much time others took."""
    notes = []
    bound = [
        f"{cell.scheduler} on {cell.backend} ({100 * (cell.cores_busy or 0):.0f} %)"
        for cell in cells
        if is_core_bound(cell)
    ]
    if bound:
        notes.append(
            f"messages kept the cores busy for {100 * BUSY:.0f} % of the time or more, so that "
            f"these times tell of the cores as well as of the network: {', '.join(bound)}"
        )
    stolen = sorted(cell.cores_stolen for cell in cells if cell.cores_stolen is not None)
    if stolen and stolen[-1] >= STOLEN:
        middle, most = (f"{100 * share:.1f} %" for share in (stolen[len(stolen) // 2], stolen[-1]))
        notes.append(
            f"{middle} of the cores' time (in one cell {most}) was stolen by the host of this "
            "virtual machine: repeat what lies close together"
        )
    return notes
