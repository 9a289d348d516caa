"""What others on the same host took while a cell was measured."""

from __future__ import annotations

from typing import Final

from testbed.records.cell import Cell

NOTICED: Final = 0.01
TOO_MUCH: Final = 0.03
LINK_STOLEN: Final = "cores_stolen"  # key in the link of a cell


def describe_stolen(cell: Cell) -> str:
    """Both shares, each with its window; empty where nothing was recorded.

    Example:
        >>> from testbed.config import RunConfig
        >>> describe_stolen(Cell(backend="gloo", workload="w", num_workers=2, config=RunConfig(),
        ...                      cores_stolen=0.02, link={"cores_stolen": 0.051}))
        '5.1 % while the link was measured, 2.0 % during the steps'
    """
    during_link = (cell.link or {}).get(LINK_STOLEN)
    windows = (
        ("while the link was measured", during_link),
        ("during the steps", cell.cores_stolen),
    )
    return ", ".join(f"{100 * share:.1f} % {when}" for when, share in windows if share is not None)


def stolen_of(cell: Cell) -> float | None:
    """Share of the cores' time that a virtual machine's host gave to others.

    The larger of two: while the link was measured that the prediction is made with, and from the
    first measured step to the last. None where neither was recorded.

    Example:
        >>> from testbed.config import RunConfig
        >>> stolen_of(Cell(backend="gloo", workload="w", num_workers=2, config=RunConfig(),
        ...                cores_stolen=0.02, link={"cores_stolen": 0.05}))
        0.05
    """
    shares = [cell.cores_stolen, (cell.link or {}).get(LINK_STOLEN)]
    return max((share for share in shares if share is not None), default=None)
