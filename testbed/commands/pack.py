"""`testbed pack`: a sweep's folder as one file."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from testbed.base.errors import UsageError
from testbed.base.files import write_atomically
from testbed.base.units import format_bytes
from testbed.commands.checks import check_output
from testbed.records.archive import SUFFIX
from testbed.records.archive import pack as make_archive

_SHOWN = 10  # files that were left out


def pack(
    folder: Annotated[Path, typer.Argument(help="of a sweep, as runs/results/quick-...")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="the file", show_default="the folder's name with .tar.gz, here"
        ),
    ] = None,
    no_timelines: Annotated[
        bool,
        typer.Option("--no-timelines", help="leave out what the ranks of each run did (timelines)"),
    ] = False,
) -> None:
    """Pack a sweep's folder into one archive, which `report`, `diff` and `rerun` read as it is.

    It holds plan, cells, second runs, searches and timelines; absolute paths in records are cut to
    their last name. The same folder gives the same bytes. Files beside the cells that are none are
    left out and named. An archive of other content is not written over.

    Examples:
        testbed pack runs/results/quick-1 -o quick.tar.gz

        testbed report quick.tar.gz
    """
    if output is not None:
        if not output.name.endswith((SUFFIX, ".tgz")):
            raise UsageError(f"--output is {str(output)!r}; expected a name that ends in {SUFFIX}")
        check_output("--output", output, makes_folder=True)
    data, manifest, left_out = make_archive(folder, timelines=not no_timelines)
    output = output or Path(f"{manifest.name}{SUFFIX}")
    _write(output, data)
    _tell(left_out)
    masked = f", {manifest.masked} absolute paths cut" if manifest.masked else ""
    sys.stdout.write(
        f"{output}: {len(manifest.files)} files, {format_bytes(len(data))}{masked}\n"
        f"sha256 {hashlib.sha256(data).hexdigest()}\n"
    )


def _write(output: Path, data: bytes) -> None:
    """Make the file, unless it is there already.

    Raises:
        UsageError: it is there with another content.
    """
    if not os.path.isfile(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(output, data)
    elif output.read_bytes() != data:
        raise UsageError(
            f"{output} exists and holds something else; remove it first, or name another file "
            "with --output"
        )


def _tell(left_out: Mapping[str, str]) -> None:
    """Say on standard error what of the folder the archive lacks."""
    for name, why in list(left_out.items())[:_SHOWN]:
        sys.stderr.write(f"testbed: {name} is left out: {why}\n")
    if len(left_out) > _SHOWN:
        sys.stderr.write(f"testbed: {len(left_out) - _SHOWN} more files are left out\n")
