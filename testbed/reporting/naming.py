"""What a cell is called in a note."""

from __future__ import annotations

from testbed.base.config import RunConfig
from testbed.records.cell import Cell


def short_name(cell: Cell) -> str:
    """Workload, backend, workers, and the compressor if there is one.

    Example:
        >>> short_name(Cell(backend="gloo", workload="w", num_workers=2, config=RunConfig()))
        'w/gloo/2'
    """
    words = [cell.workload, cell.backend, str(cell.num_workers)]
    if cell.config.compressor != RunConfig().compressor:
        words.append(cell.config.compressor)
    return "/".join(words)
