"""From axes to the list of configurations; pure, and complete about what is wrong with them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from testbed.base.config import FIELDS, RunConfig, make_config
from testbed.base.errors import UnknownName, UsageError


def check_again(max_again: int, again_within_min: float | None) -> None:
    """Raise UsageError unless runs can be run again so often and within that time (`Sweep`)."""
    if max_again < 0:
        raise UsageError(f"max_again is {max_again}; expected a number of runs, or 0")
    if again_within_min is None:
        return
    if not again_within_min > 0:
        raise UsageError(f"again_within_min is {again_within_min}; expected minutes, more than 0")
    if not max_again:
        raise UsageError("again_within_min without max_again; say how many runs may be run again")


@dataclass(frozen=True)
class Sweep:
    """What is to be measured.

    Attributes:
        name: of the recipe; the folder of results starts with it.
        cells: configurations, each once.
        repeats: how often each is run.
        seed: of the order in which the repeats are interleaved.
        summary: one line for people.
        max_again: how many runs may be run again at the end, those during which the host of a
            virtual machine took 3 % of the cores' time or more (see `testbed.noise.reruns`).
        again_within_min: and only those that will be done so many minutes after the beginning.
    """

    name: str
    cells: tuple[RunConfig, ...]
    repeats: int = 3
    seed: int = 1
    summary: str = ""
    max_again: int = 0
    again_within_min: float | None = None

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise UsageError(f"repeats is {self.repeats}; expected a number above 0")
        check_again(self.max_again, self.again_within_min)
        if not self.cells:
            raise UsageError(f"sweep {self.name!r} has no cells; give at least one value per axis")
        if not self.name or set(self.name) & set("/\\\0") or self.name.startswith("."):
            raise UsageError(
                f"sweep name is {self.name!r}; expected a word that can name a folder, as quick"
            )


def expand(
    base: Mapping[str, Any],
    axes: Mapping[str, Sequence[Any]],
    overrides: Sequence[Mapping[str, Any]] = ({},),
) -> tuple[RunConfig, ...]:
    """All combinations of the axes' values for each override, duplicates dropped.

    The last axis varies fastest. An override wins over an axis, and an axis over the base.

    Args:
        base: fields of every cell.
        axes: field -> its values.
        overrides: explicit cells, each on top of every combination; one empty one: axes alone.

    Raises:
        UsageError: lists every combination that cannot be, each with its reason.

    Example:
        >>> [c.workers for c in expand({"steps": 9}, {"workers": [2, 4, 2]})]
        [2, 4]
    """
    cells: dict[RunConfig, None] = {}
    problems: dict[str, None] = {}
    for values in _combinations(base, axes, overrides):
        try:
            if unknown := [name for name in values if name not in FIELDS]:
                raise UnknownName("setting", unknown[0], FIELDS)
            cell = make_config(values)
        except UsageError as error:
            problems[f"{_describe(values)}: {error}"] = None
        else:
            cells[cell] = None
    if problems:
        lines = "\n  ".join(problems)
        raise UsageError(f"{len(problems)} combination(s) cannot be run:\n  {lines}")
    return tuple(cells)


def _combinations(
    base: Mapping[str, Any],
    axes: Mapping[str, Sequence[Any]],
    overrides: Sequence[Mapping[str, Any]],
) -> Iterable[dict[str, Any]]:
    for name in axes:
        if not axes[name]:
            raise UsageError(f"axis {name!r} has no values; give at least one or leave it out")
    for override in overrides:
        for chosen in itertools.product(*axes.values()):
            yield {**base, **dict(zip(axes, chosen, strict=True)), **override}


def _describe(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items()) or "defaults"


# In which order the cells and their repeats run.


def interleave(num_cells: int, repeats: int, seed: int) -> tuple[tuple[int, int], ...]:
    """Every cell once per round, each round shuffled anew.

    A machine that grows warm or busy while a sweep runs then slows all cells alike instead of
    those that stand last; and no cell always follows the same neighbour.

    Args:
        num_cells: cells of the grid.
        repeats: number of rounds.
        seed: of the shuffles; the same seed gives the same order.

    Returns:
        (index of the cell, repeat) of each run, `repeats * num_cells` of them.

    Example:
        >>> interleave(2, 2, seed=1)
        ((1, 0), (0, 0), (1, 1), (0, 1))
    """
    shuffler = random.Random(seed)
    order: list[tuple[int, int]] = []
    for repeat in range(repeats):
        indices = list(range(num_cells))
        shuffler.shuffle(indices)
        order += [(index, repeat) for index in indices]
    return tuple(order)
