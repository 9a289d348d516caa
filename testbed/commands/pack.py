"""`testbed pack`: a sweep's folder as one file."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from testbed.base.errors import UsageError
from testbed.base.units import format_bytes
from testbed.records.archive import SUFFIX
from testbed.records.archive import pack as make_archive
from testbed.records.store import write_atomically


def pack(
    folder: Annotated[Path, typer.Argument(help="of a sweep, as runs/results/quick-...")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="the file", show_default="the folder's name with .tar.gz, here"
        ),
    ] = None,
) -> None:
    """Pack a sweep's folder into one archive, which `report`, `diff` and `rerun` read as it is.

    It holds plan, cells, second runs, searches and timelines; absolute paths in records are cut to
    their last name. The same folder gives the same bytes.

    Examples:
        testbed pack runs/results/quick-1 -o quick.tar.gz

        testbed report quick.tar.gz
    """
    data, manifest = make_archive(folder)
    output = output or Path(f"{manifest.name}{SUFFIX}")
    if not output.name.endswith((SUFFIX, ".tgz")):
        raise UsageError(f"--output is {str(output)!r}; expected a name that ends in {SUFFIX}")
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, data)
    masked = f", {manifest.masked} absolute paths cut" if manifest.masked else ""
    sys.stdout.write(
        f"{output}: {len(manifest.files)} files, {format_bytes(len(data))}{masked}\n"
        f"sha256 {hashlib.sha256(data).hexdigest()}\n"
    )
