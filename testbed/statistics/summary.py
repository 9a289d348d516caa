"""Median, quantiles, ratios and autocorrelation of samples."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Summary:
    """How many samples there are, their median and two quantiles, in the samples' unit."""

    count: int
    median: float
    p5: float
    p95: float


def quantile(samples: Sequence[float], fraction: float) -> float:
    """The value below which this fraction of the samples lies, linear between neighbours.

        q = x[floor(h)] + (h - floor(h)) (x[floor(h) + 1] - x[floor(h)]),  h = (n - 1) fraction

    Args:
        samples: at least one value, in any order.
        fraction: 0 <= fraction <= 1.

    Raises:
        ValueError: no samples, or a fraction outside its range.

    Example:
        >>> quantile([3.0, 1.0, 2.0], 0.25)
        1.5

    Reference:
        Hyndman and Fan, 1996, The American Statistician: type 7, the default of numpy.
    """
    if not samples:
        raise ValueError("quantile of no samples; expected at least one")
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction is {fraction}; expected 0 <= fraction <= 1, as 0.95")
    ordered = sorted(samples)
    position = (len(ordered) - 1) * fraction
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def summarise(samples: Sequence[float]) -> Summary | None:
    """Count, median, 5 % and 95 % quantile; None of no samples, for a table shows a gap there.

    Example:
        >>> summarise([1.0, 2.0, 9.0]).median
        2.0
    """
    if not samples:
        return None
    return Summary(
        len(samples),
        statistics.median(samples),
        quantile(samples, 0.05),
        quantile(samples, 0.95),
    )


def median_of_known(values: Iterable[float | None]) -> float | None:
    """Median of the values that were measured; None where none was.

    Example:
        >>> median_of_known([3.0, None, 1.0]), median_of_known([None])
        (2.0, None)
    """
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def efficiency(bound_s: float | None, time_s: float | None) -> float | None:
    """Share of the speed without any communication that is left with it.

        efficiency = bound_s / time_s

    Args:
        bound_s: step time of the same work on the backend `none`, in seconds.
        time_s: step time with communication, in seconds.

    Returns:
        A fraction; above 1 where noise made the bound the slower one; None if a time is unknown.

    Example:
        >>> efficiency(0.9, 1.0)
        0.9
    """
    if bound_s is None or time_s is None or not time_s > 0:
        return None
    return bound_s / time_s


def most_common(values: Sequence[str]) -> str:
    """The value that most cells share; of equally many the first; empty ones do not count.

    Example:
        >>> most_common(["a", "b", "b", ""])
        'b'
    """
    counts = Counter(value for value in values if value)
    return counts.most_common(1)[0][0] if counts else ""


def covered_s(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of spans, seconds: where several run at once, time counts once.

    Args:
        spans: beginning and end of each, in any order.

    Example:
        >>> covered_s([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0)])
        4.0
    """
    busy_s, until_s = 0.0, float("-inf")
    for begun_s, ended_s in sorted(spans):
        busy_s += max(0.0, ended_s - max(begun_s, until_s))
        until_s = max(until_s, ended_s)
    return busy_s


def autocorrelation(samples: Sequence[float]) -> float | None:
    """Correlation of neighbouring samples of one run.

        r = sum (x_i - m) (x_(i+1) - m) / sum (x_i - m)^2

    Args:
        samples: steps of one run, in their order.

    Returns:
        None where there are fewer than three samples, or all are equal.

    Example:
        >>> autocorrelation([1.0, 2.0, 1.0, 2.0, 1.0, 2.0])
        -0.8333333333333334

    Reference:
        Box and Jenkins, 1970, Time Series Analysis: biased towards 0 by about (1 + 3 r) / n.
    """
    if len(samples) < 3:
        return None
    mean = statistics.fmean(samples)
    deviations = [sample - mean for sample in samples]
    whole = sum(deviation**2 for deviation in deviations)
    if whole == 0:
        return None
    return sum(one * after for one, after in itertools.pairwise(deviations)) / whole
