"""Which cells stand together on the page, and what each is called there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from testbed.records.report import ReportCell
from testbed.reporting.naming import short_name
from testbed.reporting.setting import settings_of
from testbed.reporting.work import is_upper_bound


@dataclass(frozen=True)
class Placed:
    """A cell on the page.

    Attributes:
        number: of the cell in the report: `data-cell` of everything that shows it.
        name: of its method, that tells it from the others of its setting.
        setting: heading of the cells that it may be compared with.
        cell: with the times of the cluster that it emulated.
    """

    number: int
    name: str
    setting: str
    cell: ReportCell


def placed(cells: Sequence[ReportCell]) -> list[Placed]:
    """The cells with their names; failed ones have no setting."""
    found: dict[int, Placed] = {}
    for setting in settings_of(cells):
        bounds = {number for number in setting.places if is_upper_bound(cells[number])}
        for number in setting.places:
            bound = (
                " (upper bound)" if number in bounds and len(bounds) < len(setting.places) else ""
            )
            name = f"{setting.names[number]}{bound}"
            found[number] = Placed(number, name, setting.heading, cells[number])
    return [
        found.get(number, Placed(number, f"{short_name(cell)}, {cell.status}", "", cell))
        for number, cell in enumerate(cells)
    ]


def by_setting(cells: Iterable[Placed]) -> dict[str, list[Placed]]:
    """The cells that may be compared, by the heading of their setting."""
    found: dict[str, list[Placed]] = {}
    for each in cells:
        found.setdefault(each.setting, []).append(each)
    return found
