"""Between which bandwidths something gains: found for a function, or between measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

MIN_GAIN: Final = 0.01  # smaller gains, below 1 %, do not count

OCTAVES: Final = 10  # bandwidths are looked at from 2^-10 to 2^10 times the link's

PRECISION: Final = 1.05  # of a break-even bandwidth, as a ratio

Pays = Literal["below", "every", "none", "unclear"]  # rates at which something gains 1 % or more


@dataclass(frozen=True)
class GainRange:
    """Between which multiples of a link's bandwidth something gains 1 % or more.

    Attributes:
        best_gain: time without over time with it, less 1, where that is largest.
        best_factor: multiple of the bandwidth at which that is so.
        from_factor: break-even below it; None = it gains at the lowest bandwidth looked at.
        to_factor: break-even above it; None = it gains at the highest bandwidth looked at.
    """

    best_gain: float
    best_factor: float
    from_factor: float | None = None
    to_factor: float | None = None


def gain_range(gain: Callable[[float], float]) -> GainRange:
    """The break-even bandwidths on both sides of the largest gain.

    Looked at in factors of 2 from 2^-10 to 2^10, then bisected.

    Args:
        gain: at a factor of the link's bandwidth: time without over time with it, less 1.

    Example:
        >>> found = gain_range(lambda factor: 0.04 - 0.01 * abs(factor - 4))
        >>> found.best_factor, round(found.from_factor, 1), round(found.to_factor, 1)
        (4.0, 1.0, 6.7)
    """
    grid = [2.0**k for k in range(-OCTAVES, OCTAVES + 1)]
    gains = [gain(factor) for factor in grid]
    best = max(range(len(grid)), key=gains.__getitem__)
    if gains[best] < MIN_GAIN:
        return GainRange(gains[best], grid[best])
    below = next((k for k in range(best, -1, -1) if gains[k] < MIN_GAIN), None)
    above = next((k for k in range(best, len(grid)) if gains[k] < MIN_GAIN), None)
    return GainRange(
        gains[best],
        grid[best],
        None if below is None else _bisected(gain, grid[below], grid[below + 1]),
        None if above is None else _bisected(gain, grid[above], grid[above - 1]),
    )


def highest_break_even(gain: Callable[[float], float]) -> float:
    """The highest factor of bandwidth with a gain of 1 % or more; 0: none; infinite: all.

    Looked at in factors of 2 from 2^10 down to 2^-10, then bisected.

    Args:
        gain: at a factor of the link's bandwidth: time without over time with it, less 1.

    Example:
        >>> round(highest_break_even(lambda factor: 0.01 * 3 / factor), 1)
        3.0
    """
    grid = [2.0**k for k in range(OCTAVES, -OCTAVES - 1, -1)]
    best = next((k for k, factor in enumerate(grid) if gain(factor) >= MIN_GAIN), None)
    if best is None:
        return 0.0
    return float("inf") if best == 0 else _bisected(gain, grid[best - 1], grid[best])


def _bisected(gain: Callable[[float], float], without: float, with_gain: float) -> float:
    """Where the gain reaches 1 % between a factor without and one with it."""
    while max(without, with_gain) > PRECISION * min(without, with_gain):
        middle = (without * with_gain) ** 0.5
        if gain(middle) < MIN_GAIN:
            without = middle
        else:
            with_gain = middle
    return with_gain


def break_even_between(
    without_s: Mapping[float, float], with_s: Mapping[float, float]
) -> tuple[Pays, float | None]:
    """At which of some rates something gains 1 % or more, and below which rate, if below one.

    Both times are taken to be linear in the time per byte between two rates.

    Args:
        without_s: rate in bit/s -> seconds without it; at least one rate is in both.
        with_s: likewise with it.

    Returns:
        `below` one rate, and that in bit/s; else None: at `every` rate, at `none`, or `unclear`:
        above a rate, or gain and loss take turns.

    Example:
        >>> pays, bits_per_s = break_even_between({8: 1.0, 4: 1.02, 2: 3.0}, {8: 1, 4: 1, 2: 1})
        >>> pays, round(bits_per_s, 2)
        ('below', 5.33)
        >>> break_even_between({8: 3.0, 4: 3.0}, {8: 1.0, 4: 1.0})
        ('every', None)
    """
    rates = sorted(without_s.keys() & with_s.keys(), reverse=True)
    excess = [(8 / rate, without_s[rate] - (1 + MIN_GAIN) * with_s[rate]) for rate in rates]
    changes = [(one, two) for one, two in pairwise(excess) if (one[1] < 0) != (two[1] < 0)]
    if not changes:
        return ("none" if excess[-1][1] < 0 else "every"), None
    if len(changes) > 1 or excess[-1][1] < 0:
        return "unclear", None
    (start_s, short), (end_s, over) = changes[0]
    return "below", 8 / (start_s + (end_s - start_s) * -short / (over - short))
