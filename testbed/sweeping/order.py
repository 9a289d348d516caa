"""In which order the cells and their repeats run."""

from __future__ import annotations

import random


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
