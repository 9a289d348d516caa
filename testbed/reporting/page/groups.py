"""Which cells stand together on the page, and what each is called there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from testbed.base.axes import AXES, WORKLOADS
from testbed.records.report import ReportCell
from testbed.reporting.columns import columns_for, settings
from testbed.reporting.naming import part_of
from testbed.reporting.work import is_upper_bound, setting_key


@dataclass(frozen=True)
class Placed:
    """A cell on the page.

    Attributes:
        number: of the cell in the report: `data-cell` of everything that shows it.
        name: that tells it from the others.
        cell: with the times of the cluster that it emulated.
    """

    number: int
    name: str
    cell: ReportCell


@dataclass(frozen=True)
class Group:
    """Cells of one workload on one cluster: what may be compared.

    Attributes:
        heading: what they have in common.
        cells: in the report's order.
    """

    heading: str
    cells: tuple[Placed, ...]


def placed(cells: Sequence[ReportCell]) -> list[Placed]:
    """The cells with their names: the parts that differ, settings where these do not suffice."""
    axes = [axis for axis in AXES if axis is not WORKLOADS]
    shown = [a for a in axes if a.shown or len({part_of(cell, a) for cell in cells}) > 1]

    def name(cell: ReportCell) -> str:
        parts = [part_of(cell, a) for a in shown if a.shown or not a.is_default(cell.config)]
        return ", ".join(dict.fromkeys(parts)) + (" (upper bound)" if is_upper_bound(cell) else "")

    setting = next((c for c in columns_for(cells) if c.key == "setting"), None)
    names = [name(cell) for cell in cells]
    keys = [(text, setting_key(c), c.num_workers) for text, c in zip(names, cells, strict=True)]
    several = Counter(map(repr, keys))
    return [
        Placed(
            number,
            f"{text} [{setting.text(cell)}]" if setting and several[repr(key)] > 1 else text,
            cell,
        )
        for number, (text, key, cell) in enumerate(zip(names, keys, cells, strict=True))
    ]


def grouped(cells: Sequence[Placed], key: Callable[[ReportCell], object]) -> list[Group]:
    """The cells that agree in a key, headed by workload, workers and what differs between groups.

    Example:
        >>> grouped([], setting_key)
        []
    """
    found: dict[str, list[Placed]] = {}
    for each in cells:
        found.setdefault(repr(key(each.cell)), []).append(each)
    firsts = [each[0].cell for each in found.values()]
    told = ("batch_size", "cluster", "slow", "precision", "device", "accumulate")
    differ = [n for n in told if len({getattr(cell.config, n) for cell in firsts}) > 1]
    return [Group(_heading(each, differ), tuple(each)) for each in found.values()]


def _heading(cells: Sequence[Placed], differ: Sequence[str]) -> str:
    first = cells[0].cell
    counts = sorted({each.cell.num_workers for each in cells})
    words = ", ".join(map(str, counts))
    plural = "" if counts == [1] else "s"
    return ", ".join(
        filter(None, [first.workload, f"{words} worker{plural}", settings(first.config, differ)])
    )
