"""How far two sets of numbers lie apart, paired or not, and how sure that is."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

CONFIDENCE: Final = 0.95
LEVEL: Final = 0.05  # the chance of finding a difference where there is none


def shared_rounds(
    one: Mapping[int, float | None], other: Mapping[int, float | None], *, interleaved: bool
) -> list[int]:
    """Rounds in which two cells ran, one soon after the other; empty: their runs are not paired.

    They are in rounds if all runs of a round began before any of the next: a run that was repeated
    later, or resumed another day, shares nothing with what ran in its round.

    Args:
        one: number of a round -> when the first cell's run in it began, in seconds; None: unknown.
        other: the same of the second cell.
        interleaved: what counts where it is unknown: whether one sweep made both.

    Example:
        >>> shared_rounds({0: 1.0, 1: 3.0}, {0: 2.0, 1: 4.0}, interleaved=False)
        [0, 1]
        >>> shared_rounds({0: 1.0, 1: 2.0}, {0: 3.0, 1: 4.0}, interleaved=True)
        []
    """
    rounds = sorted(one.keys() & other.keys())
    if len(rounds) < 2:
        return []
    began = [[side[number] for side in (one, other)] for number in rounds]
    known = [[time for time in pair if time is not None] for pair in began]
    if any(len(pair) < 2 for pair in known):
        return rounds if interleaved else []
    known.sort()
    apart = all(max(pair) < min(later) for pair, later in itertools.pairwise(known))
    return rounds if apart else []


@dataclass(frozen=True, slots=True)
class Difference:
    """How far the mean of one set of numbers lies above that of another.

    Attributes:
        mean: the difference of the means.
        error: its standard error; None: one of the sets has a single number.
        freedom: degrees of freedom of the error.
        num_pairs: numbers of both that were paired; 0: they were not.
        share: error^2 over the variance of a single number: 1 / n + 1 / m, of n pairs 1 / n.
    """

    mean: float
    error: float | None
    freedom: float
    num_pairs: int
    share: float = 1.0

    def interval(self, confidence: float = CONFIDENCE) -> tuple[float, float] | None:
        """Student's interval; None without an error."""
        if self.error is None:
            return None
        half = student(self.freedom, confidence) * self.error
        return self.mean - half, self.mean + half

    @property
    def p_value(self) -> float | None:
        """Probability that alike sets lie so far apart, or farther, by chance; None: unknown."""
        from scipy.special import stdtr

        if self.error is None:
            return None
        if self.error == 0:
            return float(self.mean == 0)
        return float(2 * stdtr(self.freedom, -abs(self.mean) / self.error))


def difference_of(
    values: Sequence[float], others: Sequence[float], *, paired: bool = False
) -> Difference:
    """The mean of the first set less that of the second, with its error.

        paired:      d_i = x_i - y_i,   error = s_d / sqrt(n),   df = n - 1
        else Welch:  error^2 = s_x^2 / n + s_y^2 / m,            df by Satterthwaite

    Args:
        values: at least one.
        others: at least one; if paired as many, in the same order.
        paired: whether each number has its partner in the other set.

    Example:
        >>> found = difference_of([1.0, 2.0, 3.0], [0.5, 1.5, 2.6], paired=True)
        >>> round(found.mean, 3), round(found.p_value, 3)
        (0.467, 0.005)
        >>> round(difference_of([1.0, 2.0, 3.0], [0.5, 1.5, 2.6]).p_value, 3)
        0.607

    Reference:
        Student, 1908, Biometrika; Welch, 1947, Biometrika.
    """
    if paired:
        apart = [x - y for x, y in zip(values, others, strict=True)]
        spread, n = spread_of(apart), len(apart)
        error = None if spread is None else spread / math.sqrt(n)
        return Difference(statistics.fmean(apart), error, n - 1, n, 1 / n)
    mean = statistics.fmean(values) - statistics.fmean(others)
    if min(len(values), len(others)) < 2:
        return Difference(mean, None, 0, 0)
    shares = [statistics.variance(x) / len(x) for x in (values, others)]
    weights = [share**2 / (len(x) - 1) for share, x in zip(shares, (values, others), strict=True)]
    rest = float(len(values) + len(others) - 2)
    freedom = sum(shares) ** 2 / sum(weights) if sum(weights) else rest
    if not sum(shares) and math.isclose(values[0], others[0], rel_tol=1e-12):
        mean = 0.0  # what is left is the rounding of the means
    each = 1 / len(values) + 1 / len(others)
    return Difference(mean, math.sqrt(sum(shares)), freedom, 0, each)


def moderated(found: Sequence[Difference]) -> list[Difference]:
    """The same differences, the error of each drawn towards what all show together.

        s_i'^2 = (d0 s0^2 + d_i s_i^2) / (d0 + d_i),   df_i' = d0 + d_i
        e_i = ln s_i^2 - psi(d_i / 2) + ln(d_i / 2)
        v = mean psi'(d_i / 2),   h = max(0, var e - v),   psi'(d / 2) = h
        ln s0^2 = mean e + psi(d / 2) - ln(d / 2)
        psi'(d0 / 2) = h + sqrt(2 / (k - 1)) (h + v)

    with s_i^2 the variance of a single number. Five numbers on each side tell little of their
    spread, so that in a family little is significant; the other cells tell more of it, the more
    alike they spread.

    Args:
        found: of a family of cells, in any unit. Those that were paired, and those whose error is
            unknown, 0 (counts) or no number, stay as they are.

    Example:
        >>> alike = [difference_of([1, 1.1, 1.2 + x], [1, 1.1 + x, 1.2]) for x in (0, 0.1, 0.05)]
        >>> [round(each.error, 3) for each in alike], [round(each.freedom, 1) for each in alike]
        ([0.082, 0.111, 0.094], [4.0, 3.7, 3.9])
        >>> drawn = moderated(alike)
        >>> [round(each.error, 3) for each in drawn], [round(each.freedom, 1) for each in drawn]
        ([0.096, 0.11, 0.102], [7.9, 7.6, 7.7])

    Reference:
        Smyth, 2004, Statistical Applications in Genetics and Molecular Biology. Departs: d0 is that
        of a heterogeneity one standard error above its estimate, since a sweep has few cells, while
        s0 is that of the estimate; the variances are Welch's, with Satterthwaite's degrees of
        freedom; pairs are left alone, for with five of them 5 to 7 of 100 alike families differed.
    """
    from scipy.optimize import brentq
    from scipy.special import digamma, polygamma

    family = [(e**2 / one.share, one.freedom / 2) for one in found if (e := _unpaired_error(one))]
    if len(family) < 2:
        return list(found)
    halves = [half for _, half in family]
    logs = [math.log(s2) - float(digamma(half)) + math.log(half) for s2, half in family]
    by_chance = statistics.fmean(float(polygamma(1, half)) for half in halves)
    unlike = max(0.0, statistics.variance(logs) - by_chance)
    more = unlike + math.sqrt(2 / (len(family) - 1)) * (unlike + by_chance)

    def half_freedom(wanted: float) -> float:
        return float(brentq(lambda half: float(polygamma(1, half)) - wanted, 1e-3, 1e6))

    prior, likely = half_freedom(more), half_freedom(max(unlike, 2e-6))
    variance = math.exp(statistics.fmean(logs) + float(digamma(likely)) - math.log(likely))

    def drawn(one: Difference) -> Difference:
        if not (error := _unpaired_error(one)):
            return one
        freedom = 2 * prior + one.freedom
        squares = 2 * prior * variance * one.share + one.freedom * error**2
        return dataclasses.replace(one, error=math.sqrt(squares / freedom), freedom=freedom)

    return [drawn(one) for one in found]


def _unpaired_error(one: Difference) -> float | None:
    known = one.error is not None and math.isfinite(one.error)
    return one.error if known and not one.num_pairs else None


def holm_level(p_values: Sequence[float], level: float = LEVEL) -> float:
    """The p-value up to which differences are significant when several are tested at once.

    Sorted p_1 <= ... <= p_m, the first k are significant while p_i <= level / (m - i + 1); the
    result is level / (m - k), which is reached by these k and by no other. So the interval at a
    confidence of 1 less the result leaves out 0 exactly where a difference is significant. That
    any of m alike pairs differs has at most the probability `level`.

    Example:
        >>> holm_level([0.04]), holm_level([0.03, 0.04]), holm_level([0.001, 0.04])
        (0.05, 0.025, 0.05)

    Reference:
        Holm, 1979, Scandinavian Journal of Statistics.
    """
    left = len(p_values)
    for p_value in sorted(p_values):
        if p_value > level / left or left == 1:
            break
        left -= 1
    return level / max(1, left)


def spread_of(values: Sequence[float]) -> float | None:
    """Their standard deviation; None of fewer than two."""
    return statistics.stdev(values) if len(values) > 1 else None


@functools.cache
def student(degrees_of_freedom: float, confidence: float) -> float:
    """Half of the interval around 0 that holds Student's t with this probability."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees_of_freedom, (1 + confidence) / 2))
