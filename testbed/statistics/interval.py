"""Bootstrap interval of a median over repeats and the steps within them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Interval:
    """Lower and upper end, in the samples' unit."""

    low: float
    high: float


def bootstrap_median(
    repeats: Sequence[Sequence[float]],
    *,
    confidence: float = 0.95,
    num_resamples: int = 2000,
    seed: int = 0,
) -> Interval | None:
    """Percentile bootstrap interval of the median of all samples.

    Steps of one repeat are alike, repeats differ (another start, another neighbour on the
    machine): with several repeats, each resample first draws repeats and then steps of each drawn
    one, so that a difference between repeats widens the interval. With one repeat it draws steps.

    Args:
        repeats: samples of each repeat; empty repeats are left out.
        confidence: probability with which the interval is meant to hold the true median.
        num_resamples: resamples to draw; more give steadier ends.
        seed: of the draws, so that a report made twice is the same twice.

    Returns:
        The interval; None if fewer than two samples leave nothing to draw from.

    Raises:
        ValueError: a confidence outside 0 .. 1, or fewer than one resample.

    Example:
        >>> bootstrap_median([[1.0, 1.0, 1.0, 1.0]])
        Interval(low=1.0, high=1.0)

    Reference:
        Efron, 1979, The Annals of Statistics; two levels as Davison and Hinkley, 1997, section 3.8.
        Departs: both levels are drawn with replacement, the cautious choice of the two there.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; expected 0 < confidence < 1, as 0.95")
    if num_resamples < 1:
        raise ValueError(f"num_resamples is {num_resamples}; expected at least 1")
    groups = [np.asarray(samples, dtype=float) for samples in repeats if len(samples)]
    if sum(len(group) for group in groups) < 2:
        return None
    random = np.random.default_rng(seed)
    medians = _resampled_medians(groups, num_resamples, random)
    tail = (1 - confidence) / 2
    low, high = np.quantile(medians, [tail, 1 - tail])
    return Interval(float(low), float(high))


def _resampled_medians(
    groups: list[np.ndarray], num_resamples: int, random: np.random.Generator
) -> np.ndarray:
    if len(groups) == 1:
        samples = groups[0]
        drawn = random.integers(len(samples), size=(num_resamples, len(samples)))
        return np.asarray(np.median(samples[drawn], axis=1))
    medians = np.empty(num_resamples)
    for i in range(num_resamples):
        chosen = random.integers(len(groups), size=len(groups))
        medians[i] = np.median(
            np.concatenate([random.choice(groups[g], size=len(groups[g])) for g in chosen])
        )
    return medians
