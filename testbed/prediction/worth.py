"""Up to which bandwidth something is worth its while."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

WORTH: Final = 0.01  # from a gain of 1 % on
OCTAVES: Final = 10  # bandwidths are looked at from 2^-10 to 2^10 times the link's
PRECISION: Final = 1.05  # of a bandwidth, as a ratio


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
