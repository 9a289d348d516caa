"""Reads the cells of a folder; one that cannot be read is named, not passed over in silence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from testbed.errors import UsageError
from testbed.records.cell import Cell, decode_cell
from testbed.records.store import PLAN, Store, SweepPlan


@dataclass(frozen=True)
class Found:
    """A cell, where it was found, and the group of repeats that it belongs to.

    Attributes:
        source: folder of the sweep.
        group: equal for the repeats of one cell.
        cell: as it was read.
    """

    source: str
    group: str
    cell: Cell


@dataclass(frozen=True)
class Collected:
    """What was found.

    Attributes:
        cells: in the order of the plan; without a plan, of the files' names.
        notes: files that could not be read, runs that are missing.
    """

    cells: tuple[Found, ...]
    notes: tuple[str, ...]


def collect_cells(directories: Sequence[Path]) -> Collected:
    """The cells of the folders of sweeps, of folders of cells, and of single files.

    Raises:
        UsageError: a folder is missing, or holds nothing that looks like a cell.
    """
    cells: list[Found] = []
    notes: list[str] = []
    for directory in dict.fromkeys(directories):
        plan, problem = _read_plan(directory)
        files = _cell_files(directory)
        read = [found for file in files if (found := _read(file, directory, plan, notes))]
        cells += sorted(read, key=lambda found: found.group)
        notes += [problem] if problem else _missing(directory, plan, files)
    return Collected(tuple(cells), tuple(notes))


def _read(file: Path, directory: Path, plan: SweepPlan | None, notes: list[str]) -> Found | None:
    """The cell in a file; what cannot be read is added to the notes."""
    try:
        cell = decode_cell(file.read_bytes())
    except msgspec.DecodeError as error:
        table = file.with_suffix(".md")
        own = f"; a study's own table is {table}" if table.exists() else ""
        notes.append(f"{file} is left out: it is no testbed.cell/1 ({error}){own}")
        return None
    return Found(str(directory), _group(file.stem, cell, plan), cell)


def _group(key: str, cell: Cell, plan: SweepPlan | None) -> str:
    """The cell's number in the plan: a failed run records its settings less resolved than others.

    Without a plan, the configuration itself.
    """
    numbers = {k: index for k, index, _ in plan.order} if plan else {}
    if key in numbers:
        return f"{numbers[key]:06d}"
    return repr(msgspec.structs.replace(cell.config, repeat=0))


def _cell_files(directory: Path) -> list[Path]:
    if directory.is_file():
        return [directory]
    if not directory.is_dir():
        raise UsageError(
            f"no folder {directory}; give the folder of a sweep, as runs/results/quick-..."
        )
    folder = directory / "cells" if (directory / "cells").is_dir() else directory
    files = sorted(path for path in folder.glob("*.json") if path.name != PLAN)
    if not files:
        raise UsageError(
            f"{directory} holds no cells yet; give the folder of a sweep, as runs/results/quick-..."
        )
    return files


def _read_plan(directory: Path) -> tuple[SweepPlan | None, str]:
    """The plan of a sweep's folder, if it is one; or what is wrong with it."""
    if not (directory / PLAN).is_file():
        return None, ""
    try:
        return Store(directory).read_plan(), ""
    except UsageError as error:
        return None, str(error)


def _missing(directory: Path, plan: SweepPlan | None, files: Sequence[Path]) -> list[str]:
    """A note if the sweep set out to run more than there is."""
    if plan is None:
        return []
    missing = {key for key, _, _ in plan.order} - {file.stem for file in files}
    if not missing:
        return []
    return [
        f"{len(missing)} of {len(plan.order)} runs of {directory} are missing; "
        f"go on with: testbed sweep --resume {directory}"
    ]
