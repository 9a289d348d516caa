"""What schedulers are predicted to do on links that nobody has measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from testbed.base.axes import SCHEDULERS
from testbed.base.link import Link
from testbed.base.plan import Plan
from testbed.base.trace import Trace
from testbed.prediction.break_even import OCTAVES, PRECISION, WORTH
from testbed.prediction.cross_iteration import predict
from testbed.prediction.extrapolate import Node, at_bandwidth
from testbed.prediction.timeline import Timeline
from testbed.scheduling.protocol import make_plan


def baselines() -> tuple[str, ...]:
    """The plain methods that others are compared with.

    Example:
        >>> baselines()
        ('sequential', 'wfbp', 'bucket')
    """
    return SCHEDULERS.which(lambda facts: facts.baseline)


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
    plain = baselines()

    def iteration_s(spec: str, factor: float) -> float:
        if (spec, factor) not in cache:
            found = plan_and_predict(spec, trace, at_bandwidth(link, factor, node))[1]
            cache[spec, factor] = found.iteration_s
        return cache[spec, factor]

    def gain(spec: str, factor: float) -> float:
        plain_s = min(iteration_s(p, factor) for p in plain)
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
