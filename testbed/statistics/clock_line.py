"""How far a clock is ahead of another one: a line through the fastest of timed exchanges; pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from testbed.base.recorder import Asked
from testbed.statistics.differences import student


@dataclass(frozen=True)
class FittedClock:
    """A clock that is ahead of another by `offset_s + drift (t - at_s)` when it shows t.

    Attributes:
        offset_s: at `at_s`.
        drift: seconds that it gains a second.
        at_s: on the clock itself.
        uncertainty_s: half width of a 95 % interval of what it is ahead, within the window.
        num_bursts: exchanges that the line was fitted to.
    """

    offset_s: float = 0.0
    drift: float = 0.0
    at_s: float = 0.0
    uncertainty_s: float = 0.0
    num_bursts: int = 0

    def aligned(self, shown_s: float) -> float:
        """What the other clock shows when this one shows so many seconds."""
        return shown_s - self.offset_s - self.drift * (shown_s - self.at_s)


def fit_clock(bursts: Sequence[Asked], window_s: tuple[float, float]) -> FittedClock:
    """The line through what a clock was ahead in each burst, by weighted least squares.

        x_i = (asked + came) / 2;  y_i = x_i - answered;  rtt_i = came - asked;  w_i = 1 / rtt_i^2
        ahead(x) = a + b (x - mean x)
        uncertainty = t_0.975(n - 2) max over the window of se(ahead) + min rtt / 2

    An answer was given at some moment between question and arrival: y_i is wrong by rtt_i / 2 at
    most, so that fast exchanges count more. What is wrong with all of them alike, because one way
    takes longer than the other, no number of exchanges tells; it is half the fastest at most.

    Args:
        bursts: the fastest exchange of each; at least one.
        window_s: begin and end, on the clock itself, of what is to be aligned.

    Example:
        >>> ahead = [(t + 0.5, t + 0.5e-3, t + 0.5 + 1e-3) for t in range(10)]
        >>> fitted = fit_clock(ahead, (0.5, 9.5))
        >>> round(fitted.offset_s, 6), abs(fitted.drift) < 1e-9, round(fitted.uncertainty_s, 6)
        (0.5, True, 0.0005)

    Reference:
        Mills, 1991, IEEE Transactions on Communications (NTP: offset from the fastest of several
        exchanges). Departs: a line over the whole run, fitted afterwards, disciplines no clock.
    """
    shown = [(asked + came) / 2 for asked, _, came in bursts]
    ahead = [x - answered for x, (_, answered, _) in zip(shown, bursts, strict=True)]
    took = [max(came - asked, 1e-9) for asked, _, came in bursts]
    weights = [(min(took) / each) ** 2 for each in took]
    total = sum(weights)
    at_s = sum(w * x for w, x in zip(weights, shown, strict=True)) / total
    first_s = ahead[0]  # differences from it lose no digits
    offset = sum(w * (y - first_s) for w, y in zip(weights, ahead, strict=True)) / total
    spread = sum(w * (x - at_s) ** 2 for w, x in zip(weights, shown, strict=True))
    drift = 0.0
    if spread > 0 and len(bursts) > 2:
        together = zip(weights, shown, ahead, strict=True)
        drift = sum(w * (x - at_s) * (y - first_s - offset) for w, x, y in together) / spread
    left = [y - first_s - offset - drift * (x - at_s) for x, y in zip(shown, ahead, strict=True)]
    free = len(bursts) - 2
    if free < 1 or spread <= 0:
        uncertainty_s = max(took) / 2
    else:
        variance = sum(w * r * r for w, r in zip(weights, left, strict=True)) / free
        farthest = max((edge - at_s) ** 2 for edge in window_s)
        error_s = math.sqrt(variance * (1 / total + farthest / spread))
        uncertainty_s = student(free, 0.95) * error_s + min(took) / 2
    return FittedClock(first_s + offset, drift, at_s, uncertainty_s, len(bursts))
