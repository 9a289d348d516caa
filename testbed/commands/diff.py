"""`testbed diff`: two folders of cells beside each other, and limits on how they may differ."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from testbed.base.files import to_json, write_atomically
from testbed.commands.checks import check_output
from testbed.reporting.diff import diff as compare
from testbed.reporting.diff_text import to_markdown, to_text
from testbed.reporting.gate import gate, parse_limit, status_of
from testbed.reporting.sides import read_side


class Format(StrEnum):
    """How the comparison is written."""

    TEXT = "text"
    MD = "md"
    JSON = "json"


def diff(
    a: Annotated[
        str, typer.Argument(help="before: a folder, an archive, a cell's .json, or FOLDER:KEY")
    ],
    b: Annotated[str, typer.Argument(help="the same: after, or the other one")],
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            help="exit with 1 if a cell of B differs so from A's: 'step_time_s > 3%', "
            "'peak_memory_bytes > 100MB', 'samples_per_s < -5%'; may be given again"
        ),
    ] = None,
    format: Annotated[Format, typer.Option(help="how to write it")] = Format.TEXT,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="write to this file instead of the terminal"),
    ] = None,
) -> None:
    """Compare two sets of cells, run by run: what differs, how surely, and what is tied.

    Cells are matched by their settings; a cell of a sweep comes with all its repeats. Exit status
    with --fail-if: 0 all limits hold, 1 one is breached, 3 none is but the runs cannot tell
    whether all hold; 2 it was asked for wrongly.

    Examples:
        testbed diff runs/results/quick-1 runs/results/quick-2

        testbed diff before after --fail-if "step_time_s > 3%" --fail-if "wire_bytes_per_step > 0"

        testbed diff runs/results/quick-1:0123 runs/results/quick-1:89ab
    """
    if output is not None:
        check_output("--output", output, makes_folder=True)
    limits = [parse_limit(text) for text in fail_if or ()]
    found = compare(read_side(a), read_side(b))
    found = msgspec.structs.replace(found, gated=gate(found, limits))
    if format is Format.JSON:
        text = to_json(found).decode()
    else:
        text = to_markdown(found) if format is Format.MD else to_text(found)
    if output is None:
        sys.stdout.write(text)
    else:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(output, text.encode())
    raise typer.Exit(status_of(found.gated))
