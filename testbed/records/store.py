"""A sweep's folder: its plan, and one file per finished cell that is whole or not there at all.

<name>-<time>/sweep.json          the plan: grid, order, environment (`testbed.sweep/1`)
<name>-<time>/cells/<key>.json    a finished or failed cell (`testbed.cell/1`)
<name>-<time>/cells/<key>.timeline.json   what its ranks did (`--timeline`), of the run that counts
<name>-<time>/cells/<key>.log     what the cell printed (its first run, if it was run twice)
<name>-<time>/cells/<key>.tuning.csv   samples of a search (`--tune`), by its first repeat
<name>-<time>/again/<key>.json    the run that does not count, of a cell that was run twice
<name>-<time>/again/<key>.timeline.json   what its ranks did
<name>-<time>/again/<key>-2.log   what its second run printed
<name>-<time>/scratch/            what a running cell writes; never read as a result
<name>-<time>/hostfile            the hosts to run on, if the sweep was given any
<name>-<time>/lock                held while a sweep is at work in the folder
<name>-<time>/lock-<k>            held while task k of a Slurm array is at work on its share
<name>-<time>/array.sbatch        the array's script, if the sweep was handed to Slurm
<name>-<time>/task-<k>.log        what its task k told
"""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import itertools
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from testbed.base.config import RunConfig, identity
from testbed.base.errors import UsageError
from testbed.base.files import go_on, sync_folder, to_json, write_atomically
from testbed.records.cell import Cell, decode_cell, encode_cell
from testbed.records.memory import SUFFIX as OF_MEMORY
from testbed.records.timeline import SUFFIX as OF_TIMELINE

SWEEP_SCHEMA: Final = "testbed.sweep/1"
RESULTS = Path("runs/results")
PLAN = "sweep.json"
KEY_LENGTH = 16


class SweepPlan(msgspec.Struct, kw_only=True, frozen=True):
    """`testbed.sweep/1`: what a sweep set out to measure.

    Attributes:
        name: of the recipe.
        summary: of the recipe.
        seed: of the order.
        repeats: how often each cell is run.
        cells: the grid, each cell once.
        order: (key, index in `cells`, repeat) of each run, in the order in which they run.
        max_again: how many runs that a virtual machine's host disturbed may be run again.
        again_within_min: and only those of them that will be done so many minutes after the sweep
            (or what goes on with it) began; None = all.
        hostfile: the hosts to run on as `testbed run --hostfile` reads them; empty: this machine.
        interface: the network interface to use there; empty: each run decides.
        environment: versions and machine at the start of the sweep.
        command: shell command that started it.
        tasks: how many tasks of a Slurm array share the runs.
        timeline: each run records what its ranks do.
        links: digest of each link file that cells name, by its name there, when the sweep began, as
            `Forecast.links` has it; empty: no cell names one, or they were not recorded yet.
    """

    schema: Literal["testbed.sweep/1"] = SWEEP_SCHEMA
    name: str
    summary: str = ""
    seed: int
    repeats: int
    cells: tuple[RunConfig, ...]
    order: tuple[tuple[str, int, int], ...]
    max_again: int = 0
    again_within_min: float | None = None
    hostfile: str = ""
    interface: str = ""
    environment: dict[str, Any] = {}
    command: str = ""
    tasks: int = 1
    timeline: bool = False
    links: dict[str, str] = {}

    def runs(self, share: int | None = None) -> Iterator[tuple[str, RunConfig]]:
        """Key and configuration of each run, in order; of one task's share: every so many-th."""
        own = self.order if share is None else self.order[share :: self.tasks]
        for key, index, repeat in own:
            yield key, msgspec.structs.replace(self.cells[index], repeat=repeat)


def cell_key(config: RunConfig) -> str:
    """The name of a cell's file: a digest of the configuration's `identity`, its repeat included.

    Example:
        >>> cell_key(RunConfig()) == cell_key(RunConfig(repeat=1))
        False
    """
    return hashlib.sha256(msgspec.json.encode(identity(config))).hexdigest()[:KEY_LENGTH]


@dataclass(frozen=True)
class Store:
    """One sweep's folder.

    Attributes:
        path: the folder.
        at: see `write_atomically`.
    """

    path: Path
    at: Callable[[str], None] = go_on

    @property
    def cells(self) -> Path:
        """Folder of the finished cells."""
        return self.path / "cells"

    @property
    def scratch(self) -> Path:
        """Folder of what is not finished."""
        return self.path / "scratch"

    @property
    def others(self) -> Path:
        """Folder of the runs that do not count, of cells that were run twice; may not be there."""
        return self.path / "again"

    @property
    def hostfile(self) -> Path:
        """The hosts to run on; not there if the sweep was given none."""
        return self.path / "hostfile"

    def write_plan(self, plan: SweepPlan) -> None:
        """Record what the sweep sets out to measure; done once, before the first cell."""
        data = to_json(plan)
        write_atomically(self.path / PLAN, data, at=self.at)

    def read_plan(self) -> SweepPlan:
        """The plan of a sweep that was begun here.

        Raises:
            UsageError: there is none, or it cannot be read.
        """
        path = self.path / PLAN
        if not path.is_file():
            raise UsageError(
                f"{self.path} holds no {PLAN}: no sweep was begun there; give the folder of one"
            )
        try:
            return msgspec.json.decode(path.read_bytes(), type=SweepPlan)
        except msgspec.DecodeError as error:
            raise UsageError(f"{path} is no {SWEEP_SCHEMA}: {error}") from error

    def write_cell(self, key: str, cell: Cell) -> None:
        """Keep a cell, finished or failed; from now on it counts."""
        write_atomically(self._path(key), encode_cell(cell), at=self.at)

    def finished(self) -> set[str]:
        """Keys of the cells that need not run again: there, whole and not failed."""
        return {path.stem for path in cell_files(self.cells) if _is_ok(path)}

    def read_cells(self) -> dict[str, Cell]:
        """Key -> cell of those that are there, whole and not failed."""
        return {key: decode_cell(self._path(key).read_bytes()) for key in self.finished()}

    def make_others(self) -> None:
        """The folder for `write_pair`."""
        self.others.mkdir(exist_ok=True)
        sync_folder(self.path)

    def write_pair(self, key: str, counting: Cell, other: Cell) -> None:
        """Keep both runs of a cell that was run again: the other one first, so that none is lost.

        Between the two writes the first run may be in both places; it was not repeated then.
        """
        write_atomically(self.others / f"{key}.json", encode_cell(other), at=self.at)
        self.write_cell(key, counting)

    def keep_timeline(self, key: str, result: Path, folder: Path) -> None:
        """Put what a run's ranks did, if they recorded it, where its cell is.

        A run that is killed before that, or records none, leaves a cell without a timeline, never
        with another's.

        Args:
            key: of the cell.
            result: where the run wrote its cell, or where the cell was.
            folder: `cells` or `others`.
        """
        made = timeline_of(result)
        kept = folder / f"{key}{OF_TIMELINE}"
        if made.exists():
            made.replace(kept)
        elif made != kept:
            kept.unlink(missing_ok=True)

    def repeated(self) -> set[str]:
        """Keys of the cells of which both runs are there and can be read."""
        keys = {path.stem for path in cell_files(self.others) if _read_cell(path) is not None}
        return {key for key in keys if (cell := _read_cell(self._path(key))) and cell.again}

    def _path(self, key: str) -> Path:
        return self.cells / f"{key}.json"

    def clear_scratch(self, keys: Collection[str]) -> None:
        """Drop what an earlier sweep that was killed left unfinished of these runs."""
        self.scratch.mkdir(exist_ok=True)
        places = (self.scratch.iterdir(), self.cells.glob(".*"), self.others.glob(".*"))
        for leftover in itertools.chain(*places):
            if leftover.name.removeprefix(".")[:KEY_LENGTH] in keys:
                leftover.unlink()

    @contextmanager
    def locked(self, share: int | None = None) -> Iterator[None]:
        """Keep a second sweep out of the folder; the lock ends with the process, however it ends.

        Args:
            share: of a Slurm array's task: other tasks may be at work on theirs, but no second
                process on this one, and no sweep on the whole folder.

        Raises:
            UsageError: another sweep is at work in the folder, or on the share.
        """
        locks = {"lock": fcntl.LOCK_EX}
        if share is not None:
            locks = {"lock": fcntl.LOCK_SH, f"lock-{share}": fcntl.LOCK_EX}
        with ExitStack() as held:
            for name, kind in locks.items():
                file = held.enter_context((self.path / name).open("a+"))
                try:
                    fcntl.flock(file, kind | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise UsageError(
                        f"another sweep is at work in {self.path} ({name}); wait for it or give "
                        "another folder"
                    ) from None
                except OSError as error:
                    raise UsageError(
                        f"{self.path} cannot be locked ({error.strerror}), and two sweeps in one "
                        "folder would undo each other's work; give a folder of a file system with "
                        "locks"
                    ) from None
            yield


def _is_ok(path: Path) -> bool:
    cell = _read_cell(path)
    return cell is not None and cell.status == "ok"


def _read_cell(path: Path) -> Cell | None:
    """None: not there, not ours or damaged; it is run again and replaced."""
    try:
        return decode_cell(path.read_bytes())
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def timeline_of(cell: Path) -> Path:
    """Where a timeline stands beside its cell.

    Example:
        >>> timeline_of(Path("cells/0a.json")).name
        '0a.timeline.json'
    """
    return cell.with_name(cell.stem + OF_TIMELINE)


def cell_files(folder: Path) -> list[Path]:
    """The files of a folder that are cells by their name, in the order of their names."""
    found = (
        path for path in folder.glob("*.json") if not path.name.endswith((OF_MEMORY, OF_TIMELINE))
    )
    return sorted(path for path in found if path.name != PLAN)


def create_store(name: str, now: datetime.datetime, directory: Path | None = None) -> Store:
    """A new folder of results, never one that is already there.

    Args:
        name: of the sweep; the folder's name starts with it.
        now: the time that the folder's name carries.
        directory: the folder itself, chosen by the user; None = a new one in `runs/results`.

    Raises:
        UsageError: `directory` exists.
    """
    if directory is None:
        path = create_numbered(RESULTS / f"{name}-{now:%Y%m%d-%H%M%S}")
    else:
        directory.parent.mkdir(parents=True, exist_ok=True)
        try:
            directory.mkdir()
        except FileExistsError:
            raise UsageError(
                f"{directory} already exists; give a new folder, or go on with --resume {directory}"
            ) from None
        path = directory
    for folder in ("cells", "scratch"):
        (path / folder).mkdir()
    return Store(path)


def create_numbered(path: Path) -> Path:
    """`path`, or `path-2` and so on if others were made in the same second."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        candidate = path if number == 1 else path.with_name(f"{path.name}-{number}")
        try:
            candidate.mkdir()
        except FileExistsError:
            number += 1
        else:
            return candidate


def newest_store(name: str | None, parent: Path = RESULTS) -> Store:
    """The sweep of this name (None: of any) that was begun last.

    Raises:
        UsageError: there is none.
    """
    begun = [Store(path.parent) for path in parent.glob(f"*/{PLAN}")]
    named = [store for store in begun if name in (None, store.read_plan().name)]
    if not named:
        what = "sweep" if name is None else f"sweep {name!r}"
        raise UsageError(f"no {what} in {parent}: nothing to resume; start it without --resume")
    return max(named, key=lambda store: ((store.path / PLAN).stat().st_mtime_ns, store.path.name))
