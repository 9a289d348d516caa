"""Up to which bandwidth something is worth its while, as a function or between measurements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

WORTH: Final = 0.01  # a method is worth its while from a gain of 1 % on


OCTAVES: Final = 10  # bandwidths are looked at from 2^-10 to 2^10 times the link's


PRECISION: Final = 1.05  # of a break-even bandwidth, as a ratio


def highest_worth(gain: Callable[[float], float]) -> float:
    """The highest factor of bandwidth with a gain of 1 % or more; 0: none; infinite: all.

    Looked at in factors of 2 from 2^10 down to 2^-10, then bisected.

    Args:
        gain: at a factor of the link's bandwidth: time without over time with it, less 1.

    Example:
        >>> round(highest_worth(lambda factor: 0.01 * 3 / factor), 1)
        3.0
    """
    grid = [2.0**k for k in range(OCTAVES, -OCTAVES - 1, -1)]
    best = next((k for k, factor in enumerate(grid) if gain(factor) >= WORTH), None)
    if best is None:
        return 0.0
    if best == 0:
        return float("inf")
    without, with_gain = grid[best - 1], grid[best]
    while without > PRECISION * with_gain:
        middle = (without * with_gain) ** 0.5
        if gain(middle) < WORTH:
            without = middle
        else:
            with_gain = middle
    return with_gain


def crossing(points: Sequence[tuple[float, float, float]]) -> float | None:
    """From which time of a byte on something gains 1 % or more; None unless there is one place.

    Both times are taken to be linear in the time of a byte between two points.

    Args:
        points: (seconds per byte, seconds without, seconds with it).

    Example:
        >>> crossing([(1.0, 1.0, 1.0), (2.0, 1.02, 1.0), (3.0, 3.0, 1.0)])
        1.5
        >>> crossing([(1.0, 3.0, 1.0), (2.0, 3.0, 1.0)]) is None
        True
    """
    excess = [(byte_s, a - (1 + WORTH) * b) for byte_s, a, b in sorted(points)]
    changes = [(one, two) for one, two in pairwise(excess) if (one[1] < 0) != (two[1] < 0)]
    if len(changes) != 1 or excess[-1][1] < 0:
        return None
    (start_s, short), (end_s, over) = changes[0]
    return start_s + (end_s - start_s) * -short / (over - short)
