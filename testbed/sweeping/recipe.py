"""Reads what to sweep: a recipe of the project by name, or a TOML file of the user's own."""

from __future__ import annotations

import importlib
import pkgutil
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from testbed.base.axes import AXES, STUDIES
from testbed.base.config import FIELDS, RunConfig
from testbed.base.errors import Unavailable, UnknownName, UsageError
from testbed.sweeping.grid import Sweep, expand

_SETTINGS = (
    *("name", "summary", "repeats", "seed", "max_again", "again_within_min"),
    *("base", "axes", "cells"),
)


class Setup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a TOML file holds, unexpanded; see `runs/README.md`.

    Attributes:
        name: of the sweep; None: the file's name.
        summary: one line for people.
        repeats: how often each cell is run.
        seed: of the order.
        max_again: see `Sweep`.
        again_within_min: likewise.
        base: fields of every cell.
        axes: field -> list of values; all combinations are run.
        cells: explicit cells, each on top of every combination of the axes.
    """

    name: str | None = None
    summary: str = ""
    repeats: int = 3
    seed: int = 1
    max_again: int = 0
    again_within_min: float | None = None
    base: dict[str, Any] = {}
    axes: dict[str, list[Any]] = {}
    cells: list[dict[str, Any]] = []


def recipe_names() -> tuple[str, ...]:
    """The project's recipes; those of several words have dashes between them."""
    package = importlib.import_module("testbed.recipes")
    return tuple(sorted(m.name.replace("_", "-") for m in pkgutil.iter_modules(package.__path__)))


def load_recipe(name: str) -> Sweep:
    """A recipe of the project.

    Raises:
        UnknownName: there is none of this name.
    """
    if name not in recipe_names():
        raise UnknownName("recipe", name, (*recipe_names(), *STUDIES))
    sweep: Sweep = importlib.import_module(f"testbed.recipes.{name.replace('-', '_')}").recipe()
    return sweep


def load_toml(path: Path) -> Sweep:
    """A sweep from a TOML file.

    Args:
        path: the file.

    Raises:
        UsageError: no such file, no TOML, an unknown setting, or combinations that cannot be run.
    """
    return expand_setup(read_setup(path), path.stem)


def read_setup(path: Path) -> Setup:
    """The checked content of a TOML file; see `load_toml`."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"no file {path}; give a TOML file or the name of a recipe") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no TOML: {error}") from error
    for key in values:
        if key not in _SETTINGS:
            raise UnknownName(f"setting of a sweep ({path})", key, _SETTINGS)
    for key in ("base", "axes"):
        _check_fields(path, key, values.get(key, {}))
    try:
        return msgspec.convert(values, Setup)
    except msgspec.ValidationError as error:
        raise UsageError(f"{path}: {error}") from None


def expand_setup(setup: Setup, name: str) -> Sweep:
    """The sweep of a setup; `name` counts where it has none of its own."""
    cells = expand(setup.base, setup.axes, setup.cells or ({},))
    return Sweep(
        *(setup.name or name, cells, setup.repeats, setup.seed, setup.summary),
        max_again=setup.max_again,
        again_within_min=setup.again_within_min,
    )


def with_axes(sweep: Sweep, axes: Mapping[str, Sequence[Any]]) -> Sweep:
    """The sweep with these axes in place of its own.

    Example:
        >>> sweep = Sweep("mine", (RunConfig(workers=2), RunConfig(workers=4)))
        >>> [c.workers for c in with_axes(sweep, {"workers": [8], "steps": [5]}).cells]
        [8]
    """
    if not axes:
        return sweep
    overrides = [_fields(cell) for cell in sweep.cells]
    if {"steps", "epochs"} & set(axes):  # one of them takes the other's place
        overrides = [
            {k: v for k, v in o.items() if k not in ("steps", "epochs")} for o in overrides
        ]
    overrides = [{k: v for k, v in o.items() if k not in axes} for o in overrides]
    cells = expand({}, axes, overrides)
    return replace(sweep, cells=cells)


def _fields(cell: RunConfig) -> dict[str, Any]:
    default = RunConfig()
    values = {name: getattr(cell, name) for name in FIELDS}
    return {name: v for name, v in values.items() if v != getattr(default, name)}


def _check_fields(path: Path, key: str, values: Any) -> None:
    if not isinstance(values, Mapping):
        raise UsageError(f"{path}: [{key}] is {values!r}; expected a table of settings")
    for name in values:
        if name not in FIELDS:
            raise UnknownName(f"setting in [{key}] of {path}", name, FIELDS)


def check_parts(cells: Iterable[RunConfig], *, files: bool = True) -> None:
    """Look at the parts that a sweep asks for, before anything runs.

    A part that is unavailable here is no mistake of the grid: its cells fail when they run, say
    why, and the others are measured all the same.

    Args:
        cells: of the sweep.
        files: look at users' own files, too; a sweep that goes on has begun with others, perhaps.

    Raises:
        UsageError: lists every specification that names no part, or an option it does not take.
    """
    cells = list(cells)
    for axis in AXES:
        look = axis.resolve if axis.is_light else axis.check_names
        problems = []
        for text, cell in {axis.of(cell): cell for cell in cells}.items():
            try:
                look(text)
                if files and axis.is_own(text):
                    axis.resolve(text).check(cell)
            except Unavailable:
                continue
            except UsageError as error:
                problems.append(f"{text}: {error}")
        if problems:
            lines = "\n  ".join(problems)
            raise UsageError(f"{axis.title} that cannot be run:\n  {lines}")
