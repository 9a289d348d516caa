"""Studies: what `testbed sweep` can answer without running a cell, from simulation alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from testbed.errors import UsageError
from testbed.records.store import write_atomically
from testbed.registry import STUDIES


@dataclass(frozen=True)
class Study:
    """An entry of the registry of studies.

    Attributes:
        name: what the command line calls it.
        summary: one line for people.
        compute: makes its files, name -> text; deterministic. The first one is for reading.
    """

    name: str
    summary: str
    compute: Callable[[], Mapping[str, str]]


def find_study(name: str | None) -> Study | None:
    """The study of this name; None where there is none, so that it may be a recipe."""
    if name is None or name not in STUDIES.paths():
        return None
    study: Study = STUDIES.load(name)
    return study


def carry_out_study(
    study: Study, folder: Path | None, json: Path | None, given: Mapping[str, object], out: TextIO
) -> int:
    """Compute, print the file for reading, and write all files where asked to.

    Args:
        study: to be computed.
        folder: for its files, which are written over; None: nothing is written.
        json: one more place for the `.json` file.
        given: what else was asked for; a study has no cells that it could apply to.
        out: where the text is printed.

    Returns:
        Exit status.

    Raises:
        UsageError: something was asked for that needs cells.
    """
    unfit = [name for name, value in given.items() if value]
    if unfit:
        raise UsageError(
            f"{study.name} is computed, not run, and has no cells for {', '.join(unfit)}; leave "
            "them out"
        )
    files = study.compute()
    out.write(next(iter(files.values())))
    for name, text in files.items():
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / name, text.encode())
        if json is not None and name.endswith(".json"):
            write_atomically(json, text.encode())
    return 0
