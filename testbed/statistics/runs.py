"""Runs as the unit of measurement: the time of a cell with its interval, and methods compared.

Steps of one run are not independent: neighbours are correlated, and all share a placement, a start
and a time of day. An interval over steps says nothing of the next run. Each run gives one number,
the logarithm of its median step after the warm-up.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from testbed.statistics.differences import CONFIDENCE, difference_of, spread_of, student

STABLE: Final = 0.03  # a cell whose runs spread by less is compared with others


@dataclass(frozen=True, slots=True)
class Estimate:
    """The time of a cell over its runs, in the unit of the medians.

    Attributes:
        time: geometric mean of the runs' medians.
        low: lower end of the interval; None with fewer than two runs.
        high: upper end; None with fewer than two runs.
        smallest: median of the fastest run.
        largest: median of the slowest run.
        spread: standard deviation of the logarithms, so about a share of the time; None with fewer
            than two runs.
        num_runs: runs that it is made from.
    """

    time: float
    low: float | None
    high: float | None
    smallest: float
    largest: float
    spread: float | None
    num_runs: int


def estimate(medians: Sequence[float], confidence: float = CONFIDENCE) -> Estimate | None:
    """The time of a cell and Student's interval for it, from the median step of each run.

        x_i = ln m_i,   exp(mean x -+ t(n - 1, (1 + confidence) / 2) s / sqrt(n))

    Args:
        medians: median step of each run, above 0.
        confidence: probability with which the interval is meant to hold the cell's time.

    Returns:
        None of no runs. One run has no interval: nothing tells how far another would be off.

    Raises:
        ValueError: a median that is not above 0, or a confidence outside 0 .. 1.

    Example:
        >>> found = estimate([1.00, 1.02, 0.99, 1.01, 1.03])
        >>> round(found.time, 3), round(found.low, 3), round(found.high, 3)
        (1.01, 0.99, 1.03)
        >>> estimate([1.0]).low is None
        True

    Reference:
        Student, 1908, Biometrika; runs as the unit: Kalibera and Jones, 2013, ISMM. Departs: the
        levels below the run enter through the run's median alone.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; expected 0 < confidence < 1, as 0.95")
    if not medians:
        return None
    logs, n = _logs(medians), len(medians)
    mean, spread = statistics.fmean(logs), spread_of(logs)
    smallest, largest = min(medians), max(medians)
    if spread is None:
        return Estimate(medians[0], None, None, smallest, largest, None, n)
    half = student(n - 1, confidence) * spread / math.sqrt(n)
    time, low, high = (math.exp(mean + d) for d in (0.0, -half, half))
    return Estimate(time, low, high, smallest, largest, spread, n)


@dataclass(frozen=True, slots=True)
class Ratio:
    """The time of one cell over that of another.

    Attributes:
        ratio: below 1 where the first is faster.
        low: lower end of its interval; None: too few runs.
        high: upper end; None: likewise.
        num_pairs: runs of both that were paired; 0: they were not.
    """

    ratio: float
    low: float | None
    high: float | None
    num_pairs: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the runs of a family of cells tell of their order.

    Attributes:
        ranks: of each cell that is ranked: 1 + how many are significantly faster.
        tied: of each cell that is ranked, those from which it does not differ significantly.
        unstable: cells whose own spread is too large; they are not ranked.
        spread: pooled standard deviation of the logarithms; None: nothing is ranked.
        degrees_of_freedom: of the pooled spread.
        resolves: smallest ratio less 1 between two ranked cells that is significant, for the two
            with the fewest runs; None: nothing is ranked.
        means: of each cell that is ranked: the mean of the logarithms and its number of runs.
        limit: q(k, df) s.
    """

    ranks: Mapping[str, int]
    tied: Mapping[str, tuple[str, ...]]
    unstable: tuple[str, ...]
    spread: float | None = None
    degrees_of_freedom: int = 0
    resolves: float | None = None
    means: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    limit: float = 0.0

    def ratio(self, one: str, other: str) -> Ratio:
        """The time of one ranked cell over another's, with the interval that the ranks go by.

        It holds for all pairs at once, and leaves out 1 exactly where the two are not tied.
        """
        (mean, num), (mean_other, num_other) = self.means[one], self.means[other]
        apart, half = mean - mean_other, _margin(self.limit, num, num_other)
        ratio, low, high = (math.exp(apart + d) for d in (0.0, -half, half))
        return Ratio(ratio, low, high, num_pairs=0)


def compare(
    runs: Mapping[str, Sequence[float]], confidence: float = CONFIDENCE, stable: float = STABLE
) -> Comparison:
    """Which cells of a family differ: all pairs at once, by Tukey's studentized range.

        s^2 = sum (n_i - 1) s_i^2 / df,   df = sum (n_i - 1),   over the k cells with s_i < stable
        i and j differ if |mean x_i - mean x_j| > q(k, df) s sqrt((1 / n_i + 1 / n_j) / 2)

    with x the logarithms of the runs' medians and q the quantile of the studentized range: with
    this probability no two cells that are alike are called different. Cells with one run are left
    out: nothing tells their spread.

    Args:
        runs: name of each cell -> median step of each of its runs, above 0.
        confidence: for all pairs of the family together.
        stable: cells of a larger spread are called unstable and do not enter the pooled one.

    Raises:
        ValueError: a median that is not above 0.

    Example:
        >>> found = compare({
        ...     "a": [1.00, 1.01, 0.99], "b": [1.01, 1.00, 1.02], "c": [1.20, 1.21, 1.19],
        ...     "d": [1.00, 1.50, 1.25], "e": [1.00],
        ... })
        >>> dict(found.ranks), found.tied["a"], found.unstable
        ({'a': 1, 'b': 1, 'c': 3}, ('b',), ('d',))
        >>> round(found.resolves, 3)
        0.024
        >>> found.ratio("c", "a").low > 1 > found.ratio("b", "a").low
        True

    Reference:
        Tukey, 1953; for unequal numbers of runs Kramer, 1956, Biometrics. Departs: cells above
        the limit of spread are left out, for the rule takes all to spread alike.
    """
    logs = {name: _logs(medians) for name, medians in runs.items()}
    spreads = {name: s for name, x in logs.items() if (s := spread_of(x)) is not None}
    unstable = tuple(name for name, s in spreads.items() if s >= stable)
    ranked = {name: logs[name] for name, s in spreads.items() if s < stable}
    if len(ranked) < 2:
        return Comparison({}, {}, unstable)
    freedom = sum(len(x) - 1 for x in ranked.values())
    pooled = sum((len(x) - 1) * spreads[name] ** 2 for name, x in ranked.items()) / freedom
    spread = math.sqrt(pooled)
    limit = _studentized_range(len(ranked), freedom, confidence) * spread
    means = {name: statistics.fmean(x) for name, x in ranked.items()}
    faster = dict.fromkeys(ranked, 0)
    tied: dict[str, list[str]] = {name: [] for name in ranked}
    for one, other in itertools.combinations(ranked, 2):
        apart = means[other] - means[one]
        if abs(apart) > _margin(limit, len(ranked[one]), len(ranked[other])):
            faster[other if apart > 0 else one] += 1
        else:
            tied[one].append(other)
            tied[other].append(one)
    return Comparison(
        ranks={name: 1 + number for name, number in faster.items()},
        tied={name: tuple(others) for name, others in tied.items()},
        unstable=unstable,
        spread=spread,
        degrees_of_freedom=freedom,
        resolves=math.expm1(_margin(limit, *sorted(map(len, ranked.values()))[:2])),
        means={name: (mean, len(ranked[name])) for name, mean in means.items()},
        limit=limit,
    )


def _margin(limit: float, one: int, other: int) -> float:
    return limit * math.sqrt((1 / one + 1 / other) / 2)


def pooled_spread(groups: Iterable[Sequence[float]]) -> float | None:
    """The spread of runs of one cell within groups that were measured alike.

        s^2 = sum (x_i - mean of its group)^2 / sum (n_g - 1)

    Args:
        groups: medians of the runs of each group, above 0; the logarithms count.

    Returns:
        None where no group has two runs.

    Example:
        >>> pooled_spread([[1.0, 1.02], [2.0, 2.04]]) < 0.02 < pooled_spread([[1.0, 1.02, 2.0]])
        True
    """
    several = [_logs(medians) for medians in groups if len(medians) > 1]
    freedom = sum(len(logs) - 1 for logs in several)
    squares = sum((len(logs) - 1) * statistics.variance(logs) for logs in several)
    return math.sqrt(squares / freedom) if freedom else None


def ratio_of(
    runs: Mapping[int, float], others: Mapping[int, float], confidence: float = CONFIDENCE
) -> Ratio | None:
    """The ratio of two cells' times and its interval, from runs that were paired by their round.

        d_i = ln(m_i / m'_i),   exp(mean d -+ t(n - 1) s_d / sqrt(n))              over n rounds

    Where they did not run in the same rounds, two or more, the runs count as independent and
    Welch's interval is taken:

        exp(mean x - mean x' -+ t(df) sqrt(s^2 / n + s'^2 / n')),   df by Satterthwaite

    Either way the ratio is that of the two cells' times, each over all its runs.

    Args:
        runs: number of the round -> median step of the first cell's run in it, above 0.
        others: the same of the second cell.
        confidence: of the interval.

    Returns:
        None where one of them has no runs; no interval where one has a single run.

    Raises:
        ValueError: a median that is not above 0.

    Example:
        >>> found = ratio_of({0: 0.70, 1: 0.72, 2: 0.78}, {0: 1.00, 1: 1.02, 2: 1.12})
        >>> round(found.low, 3), round(found.ratio, 3), round(found.high, 3), found.num_pairs
        (0.689, 0.701, 0.713, 3)

    Reference:
        Student, 1908, Biometrika; Welch, 1947, Biometrika; ratios of paired runs: Kalibera and
        Jones, 2013, ISMM.
    """
    if not runs or not others:
        return None
    paired = runs.keys() == others.keys() and len(runs) > 1
    sides = (_logs([side[i] for i in sorted(side)]) for side in (runs, others))
    found = difference_of(*sides, paired=paired)
    ends = found.interval(confidence)
    low, high = (None, None) if ends is None else map(math.exp, ends)
    return Ratio(math.exp(found.mean), low, high, found.num_pairs)


def _logs(medians: Sequence[float]) -> list[float]:
    for median in medians:
        if not (math.isfinite(median) and median > 0):
            raise ValueError(
                f"median of a run is {median}; expected a time above 0; leave failed runs out"
            )
    return [math.log(median) for median in medians]


@functools.cache
def _studentized_range(num_cells: int, degrees_of_freedom: int, confidence: float) -> float:
    from scipy.stats import studentized_range

    return float(studentized_range.ppf(confidence, num_cells, degrees_of_freedom))
