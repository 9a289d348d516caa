"""Studies: what `testbed sweep` answers in a table of its own, mostly from simulation."""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from testbed.base.axes import STUDIES
from testbed.base.errors import UsageError
from testbed.base.files import write_atomically
from testbed.base.spec import parse_spec
from testbed.records.cell import Cell, decode_cell
from testbed.records.store import PLAN, RESULTS, Store, cell_files, create_numbered
from testbed.sweeping.grid import Sweep
from testbed.sweeping.run import begin, make_plan


@dataclass(frozen=True)
class Measured:
    """What the part of a study that runs on this machine ended in.

    Attributes:
        files: name -> text; the first one is for reading; none if it was interrupted.
        status: exit status; 0: all cells finished, 1: some failed, 130: interrupted.
    """

    files: Mapping[str, str]
    status: int = 0


@dataclass(frozen=True)
class Study:
    """An entry of the registry of studies.

    Attributes:
        name: what the command line calls it.
        summary: one line for people.
        compute: makes its files, name -> text; deterministic. The first one is for reading.
        go_on: the same for a folder, in which it keeps what is done and from which it goes on
            where it was stopped; None: it takes seconds and is computed whole.
        measure: a second part that runs cells on this machine, given the folder that keeps them,
            from which it goes on where it was stopped, and the first part's files; None: there is
            none.
        with_options: the study as options of `name:key=value` want it; None: it has none.
    """

    name: str
    summary: str
    compute: Callable[[], Mapping[str, str]]
    go_on: Callable[[Path], Mapping[str, str]] | None = None
    measure: Callable[[Path, Mapping[str, str]], Measured] | None = None
    with_options: Callable[[Mapping[str, str]], Study] | None = None


def find_study(text: str | None) -> Study | None:
    """The study that `name` or `name:key=value,...` means; None where there is none of this name.

    Raises:
        UsageError: the study has no such option, or it cannot have the value.
    """
    if not text:
        return None
    spec = parse_spec(text)
    if spec.name not in STUDIES.paths():
        return None
    study: Study = STUDIES.load(spec.name)
    if not spec.options:
        return study
    if study.with_options is None:
        raise UsageError(f"study {study.name!r} has no options; leave out {text!r}'s")
    return study.with_options(spec.options)


def carry_out_study(
    study: Study, folder: Path | None, json: Path | None, given: Mapping[str, object], out: TextIO
) -> int:
    """Compute, print the file for reading, and write all files where asked to.

    How long computing took is told on standard error: it is no part of what was computed.

    Args:
        study: to be computed.
        folder: for its files, which are written over; None: nothing is written, or where cells
            are run, a new folder in `runs/results`.
        json: one more place for the first part's `.json` file.
        given: what else was asked for; a study has no cells that it could apply to.
        out: where the text is printed.

    Returns:
        Exit status.

    Raises:
        UsageError: something was asked for that the study does not take.
    """
    unfit = [name for name, value in given.items() if value]
    if unfit:
        raise UsageError(
            f"{study.name} is computed, not run, and has no cells for {', '.join(unfit)}; leave "
            "them out"
        )
    if folder is None and study.measure is not None:
        now = datetime.datetime.now()
        folder = create_numbered(RESULTS / f"{study.name}-{now:%Y%m%d-%H%M%S}")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    begun_s = time.monotonic()
    if folder is not None and study.go_on is not None:
        files = study.go_on(folder)
    else:
        files = study.compute()
    took_s = time.monotonic() - begun_s
    print(f"{study.name}: computed in {took_s:.0f} s", file=sys.stderr, flush=True)
    _hand_out(files, folder, out)
    for name, text in files.items():
        if json is not None and name.endswith(".json"):
            write_atomically(json, text.encode())
    if folder is None or study.measure is None:
        return 0
    measured = study.measure(folder, files)
    if measured.files:
        out.write("\n")
        _hand_out(measured.files, folder, out)
    out.write(f"\n{folder}\n")
    return measured.status


def _hand_out(files: Mapping[str, str], folder: Path | None, out: TextIO) -> None:
    """Print the file for reading, and keep all of them."""
    out.write(next(iter(files.values())))
    out.flush()
    for name, text in files.items():
        if folder is not None:
            write_atomically(folder / name, text.encode())


def read_cells(path: Path) -> dict[str, Cell]:
    """Key -> cell of a sweep's folder, which need not be there."""
    files = cell_files(path / "cells")
    return {file.stem: decode_cell(file.read_bytes()) for file in files}


def study_store(path: Path, sweep: Sweep) -> Store:
    """The folder of a study's cells: a new one, or one that was begun with the same sweep.

    Raises:
        UsageError: it was begun with another.
    """
    plan = make_plan(sweep)
    if not (path / PLAN).is_file():
        return begin(plan, path)
    store = Store(path)
    if store.read_plan().order != plan.order:
        raise UsageError(
            f"{path} holds cells of other settings than those that are to be run now; remove it, "
            "or give another folder with --output"
        )
    return store
