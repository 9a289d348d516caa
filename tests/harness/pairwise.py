"""Few combinations that hold every pair of values of two axes at least once."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

Choice = tuple[str, ...]
Pair = tuple[int, str, int, str]


def pairs_of(choice: Choice) -> set[Pair]:
    """The pairs that a combination holds: (axis, value, axis, value)."""
    numbered = list(enumerate(choice))
    return {(i, a, j, b) for (i, a), (j, b) in itertools.combinations(numbered, 2)}


def possible_pairs(axes: Sequence[Sequence[str]], allowed: Callable[[Choice], bool]) -> set[Pair]:
    """The pairs of all combinations that are allowed."""
    return set().union(*(pairs_of(c) for c in itertools.product(*axes) if allowed(c)))


def covering(
    axes: Sequence[Sequence[str]], allowed: Callable[[Choice], bool], tries: int = 40
) -> list[Choice]:
    """Allowed combinations that hold all pairs that any of them holds; greedy, the same each time.

    Example:
        >>> len(covering([["a", "b"], ["c", "d"], ["e", "f"]], lambda choice: True)) < 8
        True
    """
    draw = random.Random(0)
    everything = [choice for choice in itertools.product(*axes) if allowed(choice)]
    left = set().union(*(pairs_of(choice) for choice in everything)) if everything else set()
    holding: dict[Pair, list[Choice]] = {}
    for choice in everything:
        for pair in pairs_of(choice):
            holding.setdefault(pair, []).append(choice)
    found: list[Choice] = []
    for pair in sorted(left):
        if pair in left:
            offered = holding[pair]
            some = offered if len(offered) <= tries else draw.sample(offered, tries)
            best = max(some, key=lambda choice: len(pairs_of(choice) & left))
            found.append(best)
            left -= pairs_of(best)
    return found
