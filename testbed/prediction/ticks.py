"""Plans whose messages start at the ticks of a background loop, as Horovod's do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Final

from testbed.prediction.link import Link

MIN_PERIOD_S: Final = 1e-6  # shorter ones would be lost in the rounding of times


def is_period(period_s: float) -> bool:
    """Whether a loop can tick so often: 0, or at least 1 us.

    Example:
        >>> is_period(0.0), is_period(1e-3), is_period(1e-300), is_period(float("nan"))
        (True, True, False, False)
    """
    return period_s == 0 or MIN_PERIOD_S <= period_s < inf


@dataclass(frozen=True)
class Ticks:
    """When a background loop looks for ready gradients; the first tick is the start of backward.

    Whoever reads a period from outside checks it with `is_period`.

    Attributes:
        period_s: time between ticks; 0 = whenever the loop is free.
        blocking: the loop itself carries the messages: no tick before they have ended.
    """

    period_s: float
    blocking: bool

    def at_or_after(self, base_s: float, moment_s: float) -> float:
        """The first tick of the grid that starts at `base_s` and is not before the moment."""
        if moment_s <= base_s or self.period_s == 0:
            return max(base_s, moment_s)
        steps = ceil((moment_s - base_s) / self.period_s)
        # The quotient is rounded: the neighbours decide, so that no tick is early or missed.
        while base_s + steps * self.period_s < moment_s:
            steps += 1
        while base_s + (steps - 1) * self.period_s >= moment_s:
            steps -= 1
        return base_s + steps * self.period_s


def ticked_s(
    ready_s: Sequence[float], num_bytes: Sequence[float], link: Link, ticks: Ticks
) -> list[tuple[float, float]]:
    """Start and end of messages on one channel that are taken up at ticks only.

    At a tick all ready messages are queued: s_k = max(E_{k-1}, tick). A blocking loop ticks next
    at max(tick + period, end of the last message).

    Example:
        >>> link = Link(backend="x", num_workers=2, latency_s=4, seconds_per_byte=1)
        >>> ticked_s([4, 15], [7, 3], link, Ticks(5, True))
        [(5.0, 16.0), (16.0, 23.0)]
    """
    spans: list[tuple[float, float]] = []
    tick_s = next_s = free_s = 0.0
    for ready, size in zip(ready_s, num_bytes, strict=True):
        if ready > tick_s:
            tick_s = ticks.at_or_after(next_s if ticks.blocking else 0.0, ready)
        start_s = max(free_s, tick_s)
        free_s = start_s + link.time_s(size)
        next_s = max(tick_s + ticks.period_s, free_s)
        spans.append((start_s, free_s))
    return spans
