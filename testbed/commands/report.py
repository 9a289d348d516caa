"""`testbed report`: one table from the folders of sweeps; needs no torch."""

from __future__ import annotations

import io
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from testbed.records.report import encode_report
from testbed.records.store import write_atomically
from testbed.reporting.aggregate import collect_cells
from testbed.reporting.formats import FORMATS
from testbed.reporting.make import make_report
from testbed.reporting.terminal import print_report


class Format(StrEnum):
    """How the report is written."""

    TABLE = "table"
    MD = "md"
    CSV = "csv"
    JSON = "json"
    LATEX = "latex"


def report(
    directories: Annotated[
        list[Path], typer.Argument(help="folders of sweeps, as runs/results/quick-...")
    ],
    format: Annotated[Format, typer.Option(help="how to write it")] = Format.TABLE,
    output: Annotated[
        Path | None, typer.Option(help="write to this file instead of the terminal")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="json: with all samples and the environment")
    ] = False,
) -> None:
    """Print one table of all cells in these folders, repeats put together.

    Examples:
        testbed report runs/results/quick-20250101-120000

        testbed report runs/results/quick-* --format csv --output quick.csv
    """
    made = make_report(collect_cells(directories))
    if format is Format.TABLE:
        if output is None:
            print_report(made, sys.stdout)
            return
        buffer = io.StringIO()
        print_report(made, buffer)
        text = buffer.getvalue()
    elif format is Format.JSON:
        text = encode_report(made, full=full).decode()
    else:
        text = FORMATS[format](made)
    if output is None:
        sys.stdout.write(text)
    else:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(output, text.encode())
