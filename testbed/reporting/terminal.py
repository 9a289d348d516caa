"""The report on a terminal: a table that fits 120 columns, notes below it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from testbed.records.report import Report, ReportCell
from testbed.reporting.columns import (
    Column,
    columns_for,
    compression_columns,
    memory_columns,
    resource_columns,
)
from testbed.reporting.formats import as_shown, shown
from testbed.reporting.ranking import describe_family
from testbed.reporting.work import is_upper_bound

_WIDTH = 120
# Columns of words give way to figures, which are never broken.
_MIN_WIDTH = {"backend": 14, "same_work": 7, "status": 7}
_IN_HEADING = ("workload", "num_workers", "setting")
_MAX_WIDTH = {"same_work": 7, "status": 14}


def print_report(report: Report, out: TextIO) -> None:
    """Write a table per workload, number of workers and setting, then notes and provenance.

    A stream that is no terminal gets 120 columns, whatever the environment says.
    """
    report = as_shown(report)
    width = None if out.isatty() else _WIDTH
    console = Console(file=out, width=width, highlight=False, soft_wrap=False)
    columns = [c for c in columns_for(report.cells) if c.title and not c.wide]
    columns = [c for c in columns if any(c.text(cell) for cell in report.cells)]
    setting = next((c for c in columns if c.key == "setting"), None)

    def block(cell: ReportCell) -> tuple[str, int, str]:
        return cell.workload, cell.num_workers, setting.text(cell) if setting else ""

    for (workload, num_workers, words), cells in groupby(
        sorted(report.cells, key=block), key=block
    ):
        workers = f"{num_workers} worker{'s' if num_workers != 1 else ''}"
        heading = f"{workload}, {workers}" + (f", {words}" if words else "")
        shown_cells = list(cells)
        console.print(Text(heading, style="bold"))
        console.print(_table(columns, shown_cells, report.cells))
        numbers = {cell.family for cell in shown_cells}
        for family in report.families:
            if family.number in numbers:
                console.print(Text(describe_family(family)))
        console.print()
    compressed = [cell for cell in report.cells if cell.compression is not None]
    if compressed:
        own = compression_columns(compressed)
        console.print(Text("What compressing cost, per step and rank", style="bold"))
        console.print(_table(own, compressed, compressed))
        console.print()
    foreseen = [cell for cell in report.cells if cell.memory is not None]
    if foreseen:
        console.print(Text("Live storages at the peak of a step, rank 0", style="bold"))
        console.print(_table(memory_columns(foreseen), foreseen, foreseen))
        console.print()
    spread = [c for c in report.cells if c.resources is not None and c.resources.links]
    if spread:
        console.print(Text("Throughput for what was occupied", style="bold"))
        console.print(_table(resource_columns(spread), spread, spread))
        console.print()
    for note in report.notes:
        console.print(Text(f"- {note}"))
    if report.provenance:
        console.print(Text(report.provenance, style="dim"))


def _table(
    columns: Sequence[Column], cells: Sequence[ReportCell], every: Sequence[ReportCell]
) -> Table:
    """The table of some cells, its columns as wide as those of every other table of the report.

    What a table's cells have in common stands above it, which leaves room to their options.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    columns = [column for column in columns if column.key not in _IN_HEADING]
    for column in columns:
        lines = [line for cell in every for line in _lines(column, cell).split("\n")]
        longest = max(map(len, [*lines, *column.title.split("\n")]))
        table.add_column(
            Text(column.title),
            justify="right" if column.numeric else "left",
            no_wrap=column.numeric,
            overflow="fold",
            min_width=min(longest, _MIN_WIDTH.get(column.key, longest)),
            max_width=_MAX_WIDTH.get(column.key),
        )
    for cell in cells:
        table.add_row(*(_text(column, cell) for column in columns))
    return table


def _text(column: Column, cell: ReportCell) -> Text:
    style = "red" if column.key == "status" and cell.status == "failed" else ""
    return Text(_lines(column, cell), style=style)


def _lines(column: Column, cell: ReportCell) -> str:
    """A cell's text, broken where it reads best."""
    if column.key == "status" and cell.status == "failed":
        return "failed"  # a note below says why
    text = shown(column, cell)
    if column.key == "step_time_s":
        return text.replace(" [", "\n[").replace(" (", "\n(")
    if column.key == "rank":
        return text.replace(" ", "\n").replace("unstable", "un-\nstable")
    if column.key == "backend" and is_upper_bound(cell):
        return text.replace(" (", "\n(")
    if column.key == "backend":
        name, colon, options = text.partition(":")
        return "\n ".join([name + colon, *options.split(",")]) if colon else text
    return text
