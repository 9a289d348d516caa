"""What is compared: the cells of a folder, of an archive, or one of them, with all their runs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from testbed.base.config import RunConfig
from testbed.base.errors import UsageError, closest
from testbed.base.units import format_bytes
from testbed.records.archive import MASK
from testbed.records.cell import Cell
from testbed.records.store import PLAN
from testbed.reporting.aggregate import Found, began_s, collect_cells
from testbed.reporting.work import files_of, settings_of
from testbed.statistics.differences import shared_rounds


@dataclass(frozen=True)
class Runs:
    """All runs of one cell on one side.

    Attributes:
        settings: those that the cell is known by (see `settings_of`); with the folders of its files
            and how it was recorded where a side that is compared holds another one of the same
            settings.
        source: where they were read from.
        ok: the finished ones, by number of the repeat, or in the order in which they began.
        failed: the others.
    """

    settings: RunConfig
    source: str
    ok: Mapping[int, Cell]
    failed: tuple[Cell, ...]

    @property
    def full(self) -> RunConfig:
        """Its settings with the folders of files and how it was recorded."""
        return _full(_known([*self.ok.values(), *self.failed]))


@dataclass(frozen=True)
class Side:
    """One of the two things that are compared.

    Attributes:
        name: as it was given.
        cells: each with its runs.
        notes: what could not be read, or is missing.
    """

    name: str
    cells: tuple[Runs, ...]
    notes: tuple[str, ...] = ()

    @property
    def runs(self) -> list[Cell]:
        """The finished runs of all its cells."""
        return [cell for each in self.cells for cell in each.ok.values()]


def find_place(text: str) -> tuple[Path, str]:
    """The folder, archive or file that a text names, and the key after its colon.

    A file among the cells of a sweep is the sweep's folder and its key.

    Raises:
        UsageError: there is no such thing.

    Example:
        >>> find_place("runs/aa/bank:0123")
        (PosixPath('runs/aa/bank'), '0123')
    """
    path, key = Path(text), ""
    if not path.exists():
        before, colon, after = text.rpartition(":")
        if not (colon and Path(before).exists()):
            raise UsageError(
                f"no folder or file {text!r}; give the folder of a sweep, as "
                "runs/results/quick-..., an archive of one, a cell's .json, or FOLDER:KEY"
            )
        path, key = Path(before), after
    sweep = path.resolve().parent.parent
    if path.suffix == ".json" and path.resolve().parent.name == "cells" and (sweep / PLAN).exists():
        return path.parent.parent if path.parent.name == "cells" else sweep, path.stem
    return path, key


def read_side(text: str) -> Side:
    """The cells that a text names; of one in a sweep, all its repeats.

    Raises:
        UsageError: there is nothing of that name, or it holds no cells.
    """
    path, key = find_place(text)
    collected = collect_cells([path])
    found: Sequence[Found] = collected.cells
    if key:
        group = pick(found, key, path).group
        found = [each for each in found if each.group == group]
    if not found:
        raise UsageError(f"{text} holds no cell that can be read: {'; '.join(collected.notes)}")
    return Side(text, tuple(grouped(found)), () if key else collected.notes)


def read_run(text: str) -> tuple[Cell, list[Cell]]:
    """The one run that a text names, and all finished runs of its cell in the same folder.

    Raises:
        UsageError: there is nothing of that name, or it holds several runs.
    """
    path, key = find_place(text)
    collected = collect_cells([path])
    if not collected.cells:
        raise UsageError(f"{text} is no cell that can be read: {'; '.join(collected.notes)}")
    if not key and len(collected.cells) > 1:
        keys = ", ".join(each.key for each in collected.cells[:3])
        raise UsageError(
            f"{text} holds {len(collected.cells)} runs; name one as {text}:KEY, of {keys}, ..."
        )
    found = pick(collected.cells, key, path)
    alike = (each.cell for each in collected.cells if each.group == found.group)
    return found.cell, [cell for cell in alike if cell.status == "ok"]


def pick(found: Sequence[Found], key: str, where: Path) -> Found:
    """The run of a key, or of the one key that begins so.

    Raises:
        UsageError: there is none, or there are several.
    """
    matching = [each for each in found if each.key.startswith(key)]
    if exact := [each for each in matching if each.key == key]:
        matching = exact
    if len(matching) != 1:
        keys = sorted(each.key for each in matching or found)
        shown = ", ".join(keys[:5]) + (", ..." if len(keys) > 5 else "")
        what = f"{len(matching)} cells begin with" if matching else "no cell is"
        raise UsageError(
            f"{what} {key!r} in {where}: there are {shown}" + closest(key, keys) * (not matching)
        )
    return matching[0]


def grouped(found: Iterable[Found]) -> list[Runs]:
    """The runs put together by cell.

    Cells that differ in the folders of their files, or in how they were recorded, stay apart.
    """
    groups: dict[str, list[Cell]] = {}
    sources: dict[str, str] = {}
    for each in found:
        groups.setdefault(each.group, []).append(each.cell)
        sources[each.group] = each.source
    cells: dict[tuple[RunConfig, str], list[Cell]] = {}
    source_of: dict[tuple[RunConfig, str], str] = {}
    for group, runs in groups.items():
        full = _full(_known(runs))
        # folders that were cut when they were packed may have been others
        is_cut = any(MASK in text for text in files_of(full).values())
        key = full, group if is_cut else ""
        cells.setdefault(key, []).extend(runs)
        source_of[key] = sources[group]
    return [
        Runs(
            settings_of(_known(runs)),
            source_of[key],
            _numbered([cell for cell in runs if cell.status == "ok"]),
            tuple(cell for cell in runs if cell.status == "failed"),
        )
        for key, runs in cells.items()
    ]


def _known(runs: Sequence[Cell]) -> Cell:
    """The run that knows most of its settings: a failed one may not have learnt all."""
    return next((cell for cell in runs if cell.status == "ok"), runs[0])


# Settings of the record that may change what is measured, so that other values make another cell.
_RECORDED = ("warmup", "evaluate_every", "verify_steps", "every", "measure_memory")


def _full(cell: Cell) -> RunConfig:
    """Its settings with the folders of files and how it was recorded; a checkpoint has no name."""
    kept: dict[str, Any] = {name: getattr(cell.config, name) for name in _RECORDED}
    kept["checkpoint"] = cell.config.checkpoint and "kept"
    return msgspec.structs.replace(settings_of(cell, folders=True), **kept)


def _numbered(runs: Sequence[Cell]) -> dict[int, Cell]:
    by_repeat = {cell.config.repeat: cell for cell in runs}
    if len(by_repeat) == len(runs):
        return dict(sorted(by_repeat.items()))
    return dict(enumerate(sorted(runs, key=lambda cell: str(cell.environment.get("began", "")))))


def common_rounds(one: Runs, other: Runs) -> list[int]:
    """Rounds in which both ran, one soon after the other; see `shared_rounds`.

    Where records of before do not say when runs began, those of one sweep are in rounds, because a
    sweep interleaves its repeats.

    Example:
        >>> def at(repeat: int, hour: int) -> Cell:
        ...     began = {"began": f"2026-01-01T{hour:02}:00:00+00:00"}
        ...     return Cell(backend="gloo", workload="w", num_workers=2, config=RunConfig(),
        ...                 environment=began)
        >>> def runs(*hours: int) -> Runs:
        ...     return Runs(RunConfig(), "", {i: at(i, h) for i, h in enumerate(hours)}, ())
        >>> common_rounds(runs(1, 3, 5), runs(2, 4, 6)), common_rounds(runs(1, 2), runs(3, 4))
        ([0, 1, 2], [])
    """
    began = [{number: began_s(cell) for number, cell in side.ok.items()} for side in (one, other)]
    return shared_rounds(*began, interleaved=one.source == other.source)


def match(a: Side, b: Side) -> tuple[list[tuple[Runs, Runs]], list[Runs], list[Runs]]:
    """Cells of the same settings, and those of each side that have no counterpart.

    Cells of one side that differ in the folders of their files, or in how they were recorded, alone
    belong to those with the same. A failed cell may not have learnt all its settings: it belongs to
    the only one that has those that it knows. The only cells of both sides belong together whatever
    they are.

    Raises:
        UsageError: nothing tells which of such cells belong together.
    """
    if len(a.cells) == len(b.cells) == 1:
        return [(a.cells[0], b.cells[0])], [], []
    ones, left_b = _told_apart(a, b)
    others = {each.settings: each for each in left_b}
    pairs = [(each, others[each.settings]) for each in ones if each.settings in others]
    left_a = [each for each in ones if not any(each is one for one, _ in pairs)]
    left_b = [each for each in left_b if not any(each is other for _, other in pairs)]
    for one in list(left_a):
        possible = [other for other in left_b if _may_be(one, other)]
        if len(possible) == 1:
            pairs.append((one, possible[0]))
            left_a.remove(one)
            left_b.remove(possible[0])
    order = {id(each): place for place, each in enumerate(ones)}
    return sorted(pairs, key=lambda pair: order[id(pair[0])]), left_a, left_b


def _told_apart(a: Side, b: Side) -> tuple[list[Runs], list[Runs]]:
    """The cells of both sides; where one has several of the same settings, with all of them."""
    alike: dict[RunConfig, tuple[list[Runs], list[Runs]]] = {}
    for place, side in enumerate((a, b)):
        for each in side.cells:
            alike.setdefault(each.settings, ([], []))[place].append(each)
    several = {key: both for key, both in alike.items() if max(map(len, both)) > 1}
    for ones, others in several.values():
        full, theirs = {each.full for each in ones}, {each.full for each in others}
        is_cut = len(full) < len(ones) or len(theirs) < len(others)
        if ones and others and (is_cut or (full - theirs and theirs - full)):
            told = "; ".join(
                f"{side.name} has {' and '.join(_in_full(each) for each in cells)}"
                for side, cells in ((a, ones), (b, others))
            )
            raise UsageError(
                "cells that differ in the folders of their files, or in how they were recorded, "
                f"alone cannot be matched: {told}; expected the same on both sides; name one cell "
                "of each, as FOLDER:KEY"
            )
    found = (
        [
            dataclasses.replace(each, settings=each.full) if each.settings in several else each
            for each in side.cells
        ]
        for side in (a, b)
    )
    return next(found), next(found)


def _in_full(one: Runs) -> str:
    recorded = {name: value for name, (_, value) in differing(one.settings, one.full).items()}
    told = (files_of(one.full) | recorded).items()
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in told)


def _may_be(one: Runs, other: Runs) -> bool:
    """Whether they differ in nothing but what a side that failed never came to know."""
    if one.ok and other.ok:
        return False
    pairs = ((one.settings, other.settings), (one.full, other.full))
    return any(all(None in v for v in differing(*pair).values()) for pair in pairs)


def differing(one: RunConfig, other: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Settings that two cells do not share: name -> both values.

    Example:
        >>> differing(RunConfig(steps=10), RunConfig(steps=20))
        {'steps': (10, 20)}
    """
    names = RunConfig.__struct_fields__
    pairs = {name: (getattr(one, name), getattr(other, name)) for name in names}
    return {name: values for name, values in pairs.items() if values[0] != values[1]}


# What may make two runs of the same settings differ.

_KEYS = ("commit", "python", "platform", "host", "cpu", "device", "num_cores", "memory_bytes")
_CLUSTER = ("cpu_policy", "cores", "cores_awake", "shaper", "latency", "kernel")


def environment_of(cell: Cell) -> dict[str, str]:
    """What is known of where and how a run was made, in words.

    Example:
        >>> made = {"versions": {"torch": "2.9"}, "cpu": "X", "torch_threads": 2}
        >>> environment_of(Cell(backend="gloo", workload="w", num_workers=2, config=RunConfig(),
        ...                     environment=made))
        {'cpu': 'X', 'torch_threads': '2', 'torch': '2.9'}
    """
    given = cell.environment
    found: dict[str, Any] = {key: given.get(key) for key in (*_KEYS, "launcher", "started")}
    found["torch_threads"] = given.get("torch_threads")
    if found["memory_bytes"]:
        found["memory_bytes"] = format_bytes(found["memory_bytes"])
    if cell.cluster is not None:  # the node's name, and the core that it has
        found["host"] = None
        found |= {f"cluster {key}": cell.cluster.get(key) for key in _CLUSTER}
    found |= given.get("versions") or {}
    found |= given.get("variables") or {}
    words = {key: str(value) for key, value in found.items() if value not in (None, "")}
    return {key: re.sub(r"testbed-\w{8}\b", "testbed-*", text) for key, text in words.items()}


def environment_differences(a: Iterable[Cell], b: Iterable[Cell]) -> dict[str, tuple[str, str]]:
    """What the environments of two sets of runs do not share; `-`: not there, or not recorded."""
    sides = ([environment_of(cell) for cell in a], [environment_of(cell) for cell in b])
    keys = dict.fromkeys(key for side in sides for each in side for key in each)
    differ = {}
    for key in keys:
        one, other = (sorted({each.get(key, "-") for each in side}) for side in sides)
        if one != other:
            differ[key] = (" and ".join(one), " and ".join(other))
    return differ
