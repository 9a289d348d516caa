"""Few combinations that hold every pair, or every triple, of values of different axes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

Choice = tuple[str, ...]
Group = tuple[tuple[int, str], ...]


def groups_of(choice: Choice, size: int = 2) -> set[Group]:
    """The pairs (triples, ...) of values that a combination holds, each value with its axis."""
    return set(itertools.combinations(enumerate(choice), size))


def possible_groups(
    axes: Sequence[Sequence[str]], allowed: Callable[[Choice], bool], size: int = 2
) -> set[Group]:
    """Those of all combinations that are allowed."""
    return set().union(*(groups_of(c, size) for c in itertools.product(*axes) if allowed(c)))


def covering(
    axes: Sequence[Sequence[str]],
    allowed: Callable[[Choice], bool],
    size: int = 2,
    tries: int = 40,
) -> list[Choice]:
    """Allowed combinations that hold all groups that any of them holds; greedy, the same each time.

    Args:
        axes: the values of each.
        allowed: whether a combination is.
        size: values in a group.
        tries: combinations that are looked at for each that is taken.

    Example:
        >>> len(covering([["a", "b"], ["c", "d"], ["e", "f"]], lambda choice: True)) < 8
        True
    """
    draw = random.Random(0)
    everything = [choice for choice in itertools.product(*axes) if allowed(choice)]
    holding: dict[Group, list[Choice]] = {}
    for choice in everything:
        for group in sorted(groups_of(choice, size)):
            holding.setdefault(group, []).append(choice)
    left = set(holding)
    found: list[Choice] = []
    for group in sorted(left):
        if group in left:
            offered = holding[group]
            some = offered if len(offered) <= tries else draw.sample(offered, tries)
            best = max(some, key=lambda choice: len(groups_of(choice, size) & left))
            found.append(best)
            left -= groups_of(best, size)
    return found
