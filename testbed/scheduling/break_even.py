"""What schedulers are predicted to do on links that nobody has measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Final

from testbed.base.link import Link
from testbed.base.plan import Plan
from testbed.base.trace import Trace
from testbed.prediction.cross_iteration import predict
from testbed.prediction.extrapolate import Node, at_bandwidth
from testbed.prediction.timeline import Timeline
from testbed.scheduling.protocol import make_plan

PLAIN: Final = ("sequential", "wfbp", "bucket")
WORTH: Final = 0.01  # a method is worth its while from a gain of 1 % on
OCTAVES: Final = 10  # bandwidths are looked at from 2^-10 to 2^10 times the link's
PRECISION: Final = 1.05  # of a break-even bandwidth, as a ratio


def plan_and_predict(spec: str, trace: Trace, link: Link) -> tuple[Plan, Timeline]:
    """A scheduler's plan for this very link, and its timeline there."""
    plan = make_plan(spec, trace, link)
    return plan, predict(plan, trace, link)


@dataclass(frozen=True)
class Worth:
    """Between which bandwidths a method gains on the best plain one.

    Attributes:
        scheduler: specification.
        best_gain: largest time of the best plain method over this one's, less 1.
        best_factor: at this multiple of the link's bandwidth.
        from_factor: below this multiple it gains less than 1 %; None = it gains at the lowest
            bandwidth looked at.
        to_factor: above this multiple likewise; None = it gains at the highest.
    """

    scheduler: str
    best_gain: float
    best_factor: float
    from_factor: float | None
    to_factor: float | None

    @property
    def ever(self) -> bool:
        """Whether it gains anywhere."""
        return self.best_gain >= WORTH


def break_even(
    specs: Sequence[str], trace: Trace, link: Link, node: Node | None = None
) -> list[Worth]:
    """At which bandwidth each scheduler starts and stops being worth it.

    Start-ups stay as they are and the bandwidth is varied in factors of 2; at each, a method's
    iteration is compared with the fastest of `sequential`, `wfbp` and `bucket`. Around the
    bandwidth of its largest gain, the two places where the gain falls below 1 % are found by
    bisection. With little bandwidth everything takes bytes over bandwidth, with much everything
    takes the compute time: in between lies what schedulers are for.

    Args:
        specs: to be compared.
        trace: of one worker.
        link: gives start-ups, the bandwidth that factors refer to and the number of workers.
        node: where several ranks share a machine: only the network's bandwidth is varied.
    """
    cache: dict[tuple[str, float], float] = {}

    def iteration_s(spec: str, factor: float) -> float:
        if (spec, factor) not in cache:
            found = plan_and_predict(spec, trace, at_bandwidth(link, factor, node))[1]
            cache[spec, factor] = found.iteration_s
        return cache[spec, factor]

    def gain(spec: str, factor: float) -> float:
        plain_s = min(iteration_s(p, factor) for p in PLAIN)
        own_s = iteration_s(spec, factor)
        return plain_s / own_s - 1 if own_s > 0 else 0.0

    return [_worth(spec, partial(gain, spec)) for spec in specs]


def _worth(spec: str, gain: Callable[[float], float]) -> Worth:
    grid = [2.0**k for k in range(-OCTAVES, OCTAVES + 1)]
    gains = [gain(factor) for factor in grid]
    best = max(range(len(grid)), key=gains.__getitem__)
    if gains[best] < WORTH:
        return Worth(spec, gains[best], grid[best], None, None)
    below = next((k for k in range(best, -1, -1) if gains[k] < WORTH), None)
    above = next((k for k in range(best, len(grid)) if gains[k] < WORTH), None)
    return Worth(
        spec,
        gains[best],
        grid[best],
        None if below is None else _crossing(gain, grid[below], grid[below + 1]),
        None if above is None else _crossing(gain, grid[above], grid[above - 1]),
    )


def _crossing(gain: Callable[[float], float], without: float, with_gain: float) -> float:
    """Where the gain reaches its least worthwhile value between two bandwidths."""
    while max(without, with_gain) > PRECISION * min(without, with_gain):
        middle = (without * with_gain) ** 0.5
        if gain(middle) < WORTH:
            without = middle
        else:
            with_gain = middle
    return with_gain


# Up to which bandwidth something is worth its while, as a function or between measurements.

# from a gain of 1 % on
# bandwidths are looked at from 2^-10 to 2^10 times the link's
# of a bandwidth, as a ratio


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
