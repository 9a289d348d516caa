"""Knobs: options of a method that change its speed and not its result, and what they may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from testbed.base.errors import UsageError


@dataclass(frozen=True)
class Grid:
    """A knob with a few values.

    Attributes:
        values: all of them, in their order if they have one.
    """

    values: tuple[Any, ...]

    def at(self, share: float) -> Any:
        """The value at a place from 0 to below 1 of the knob's space.

        Example:
            >>> Grid((1, 2, 4)).at(0.5)
            2
        """
        return self.values[int(share * len(self.values))]


@dataclass(frozen=True)
class Range:
    """A knob between two bounds, on a scale of logarithms: three significant digits.

    Attributes:
        low: smallest value, above 0.
        high: largest.
        whole: a whole number.
    """

    low: float
    high: float
    whole: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high:
            raise UsageError(f"knob from {self.low} to {self.high}; expected 0 < low < high")

    def at(self, share: float) -> Any:
        """The value at a place from 0 to below 1 of the knob's space: low (high / low)^share.

        Example:
            >>> Range(1, 256).at(0.5), Range(10_000, 1_000_000, whole=True).at(0.25)
            (16.0, 31600)
        """
        value = float(f"{self.low * (self.high / self.low) ** share:.3g}")
        return round(value) if self.whole else value


Knob = Grid | Range
Space = Mapping[str, Knob]


def no_knobs(options: Any) -> Space:
    """For a part whose options are no knobs: they change its result, or tell what a machine does.

    A part with options of numbers either declares knobs or states with this that it has none.

    Example:
        >>> no_knobs(None)
        {}
    """
    return {}
