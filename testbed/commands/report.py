"""`testbed report`: one table from the folders of sweeps; needs no torch."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from testbed.base.files import write_atomically
from testbed.commands.checks import check_output
from testbed.records.archive import as_folder
from testbed.records.cell import Cell, decode_cell
from testbed.records.forecast import load_forecast
from testbed.records.memory import SUFFIX as OF_MEMORY
from testbed.records.memory import MemorySimulation, decode_memory
from testbed.records.report import Report, encode_report
from testbed.records.store import Store, cell_key
from testbed.records.timeline import SUFFIX, decode_timeline, of_another_run
from testbed.reporting.aggregate import collect_cells, sweeps_in
from testbed.reporting.forecast import compare
from testbed.reporting.formats import FORMATS
from testbed.reporting.make import make_report
from testbed.reporting.page.lanes import Recorded
from testbed.reporting.page.page import to_html
from testbed.reporting.short import SHORT
from testbed.reporting.terminal import print_report


class Format(StrEnum):
    """How the report is written."""

    TABLE = "table"
    MD = "md"
    CSV = "csv"
    JSON = "json"
    LATEX = "latex"
    BENCHMARK = "benchmark"
    HTML = "html"


def runs_of(directories: Sequence[Path]) -> Iterator[tuple[str, Cell]]:
    """The finished runs of sweeps' folders, each with the key of its cell without a repeat.

    Raises:
        UsageError: a folder is no sweep's.
    """
    for directory in dict.fromkeys(directories):
        with as_folder(directory) as folder:
            store = Store(folder)
            plan, cells = store.read_plan(), store.read_cells()
        for key, index, _ in plan.order:
            if key in cells:
                yield cell_key(msgspec.structs.replace(plan.cells[index], repeat=0)), cells[key]


def links_of(directories: Sequence[Path]) -> dict[str, frozenset[str]]:
    """Digests of the link files of sweeps when these began, by name; older ones have none.

    Raises:
        UsageError: a folder is no sweep's.
    """
    found: dict[str, frozenset[str]] = {}
    for directory in dict.fromkeys(directories):
        with as_folder(directory) as folder:
            for name, digest in Store(folder).read_plan().links.items():
                found[name] = found.get(name, frozenset()) | {digest}
    return found


def timelines_of(directories: Sequence[Path]) -> Iterator[Recorded]:
    """The timelines beside the cells of sweeps' folders; those of other runs are told and left out.

    Raises:
        UsageError: a file is no timeline.
    """
    for directory in dict.fromkeys(directories):
        with as_folder(directory) as root:
            folder = root / "cells" if (root / "cells").is_dir() else root
            for path in sorted(folder.glob(f"*{SUFFIX}")):
                beside = path.with_name(path.name.removesuffix(SUFFIX) + ".json")
                if not beside.is_file():
                    continue
                try:
                    cell = decode_cell(beside.read_bytes())
                except msgspec.DecodeError:
                    continue  # a damaged cell, which the report names
                timeline = decode_timeline(path.read_bytes(), str(path))
                other = of_another_run(timeline, cell)
                if cell.status != "ok" or other:
                    why = other or "its cell failed"
                    sys.stderr.write(f"testbed: {path} is left out, of another run: {why}\n")
                    continue
                config = msgspec.structs.replace(cell.config, repeat=0)
                yield Recorded(path, str(directory), config, timeline)


def memory_of(directories: Sequence[Path]) -> Iterator[MemorySimulation]:
    """The simulations of a step's memory in sweeps' folders.

    Raises:
        UsageError: a file is no such simulation.
    """
    for directory in dict.fromkeys(directories):
        with as_folder(directory) as root:
            for path in sorted(root.glob(f"*{OF_MEMORY}")):
                yield decode_memory(path.read_bytes(), str(path))


def report(
    directories: Annotated[
        list[Path],
        typer.Argument(help="folders of sweeps, as runs/results/quick-..., or their archives"),
    ],
    format: Annotated[Format, typer.Option(help="how to write it")] = Format.TABLE,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="write to this file instead of the terminal"),
    ] = None,
    forecast: Annotated[
        Path | None,
        typer.Option(help="hold this testbed.forecast/1 file against the cells: error and skill"),
    ] = None,
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help="every column, note and comparison; json: with all samples and the environment",
        ),
    ] = False,
) -> None:
    """Answer which method is fastest in these folders, then a table for each question.

    Repeats are put together. csv and json always hold every column.

    Examples:
        testbed report runs/results/quick-20250101-120000

        testbed report runs/results/quick-* --format csv --output quick.csv

        testbed report runs/results/quick-* --format benchmark --output quick.json
        testbed report runs/results/quick-* --format html -o report.html

        testbed report runs/results/emulated-* --forecast forecast.json
    """
    if output is not None:
        check_output("--output", output, makes_folder=True)
    foreseen = None if forecast is None else load_forecast(forecast)
    title = ", ".join(dict.fromkeys(path.resolve().name for path in directories))
    directories = sweeps_in(directories)
    collected = collect_cells(directories)
    made = make_report(
        collected,
        None
        if foreseen is None
        else compare(foreseen, runs_of(directories), links_of(directories)),
    )
    if format is Format.HTML:
        text = to_html(made, title, list(timelines_of(directories)), list(memory_of(directories)))
    elif format is Format.TABLE and full and output is None:
        print_report(made, sys.stdout)
        return
    else:
        text = text_of(made, format, full)
    if output is None:
        sys.stdout.write(text)
    else:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(output, text.encode())


def text_of(made: Report, format: Format, full: bool) -> str:
    """The report in a format."""
    if format is Format.JSON:
        return encode_report(made, full=full).decode()
    if format.value in SHORT and not full:
        return SHORT[format.value](made)
    if format is Format.TABLE:
        buffer = io.StringIO()
        print_report(made, buffer)
        return buffer.getvalue()
    return FORMATS[format](made)
