"""Runs the cells of emulated shapes, in a folder from which it goes on where it was stopped."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TextIO

from testbed.cluster.access import lacking
from testbed.errors import UsageError
from testbed.published.emulated import Emulation, encode_emulation, judge
from testbed.published.emulated_table import emulation_to_markdown
from testbed.published.lines import Line
from testbed.published.shapes import Shape, sweep_of
from testbed.records.cell import Cell, decode_cell
from testbed.records.store import PLAN, Store, create_store
from testbed.sweeping.executor import Runner
from testbed.sweeping.grid import Sweep
from testbed.sweeping.run import INTERRUPTED, carry_out, make_plan, process_runner
from testbed.sweeping.study import Measured

FOLDER = "emulated"
FILE = "paper-shapes-emulated"
CELL_TIMEOUT_S = 600.0


def emulate(
    folder: Path,
    shapes: tuple[Shape, ...],
    simulated: tuple[Line, ...],
    *,
    runner: Runner | None = None,
    out: TextIO | None = None,
) -> Measured:
    """Run what is missing of the shapes' cells, and judge what is there.

    Args:
        folder: keeps the cells, in a folder of their own.
        shapes: to be judged.
        simulated: lines of the simulation.
        runner: runs one cell; None: in processes of its own.
        out: where progress is told; None: standard error.

    Raises:
        UsageError: the folder holds cells of other settings.
    """
    reason = lacking() if runner is None else None
    path, status = folder / FOLDER, 0
    if reason is None:
        store = _store(path, sweep_of(shapes))
        status = carry_out(store, runner or process_runner(store, CELL_TIMEOUT_S), out)
        if status == INTERRUPTED:
            return Measured({}, status)
    return Measured(files_of(judge(shapes, simulated, read_cells(path), reason)), status)


def read_cells(path: Path) -> dict[str, Cell]:
    """Key -> cell of a sweep's folder, which need not be there."""
    files = sorted((path / "cells").glob("*.json"))
    return {file.stem: decode_cell(file.read_bytes()) for file in files}


def files_of(emulation: Emulation) -> dict[str, str]:
    """The files for reading and for programs."""
    return {
        f"{FILE}.md": emulation_to_markdown(emulation),
        f"{FILE}.json": encode_emulation(emulation).decode(),
    }


def _store(path: Path, sweep: Sweep) -> Store:
    plan = make_plan(sweep)
    if not (path / PLAN).is_file():
        store = create_store(plan.name, datetime.datetime.now(), path)
        store.write_plan(plan)
        return store
    store = Store(path)
    if store.read_plan().order != plan.order:
        raise UsageError(
            f"{path} holds cells of other settings than those that are to be run now; remove it, "
            "or give another folder with --output"
        )
    return store
