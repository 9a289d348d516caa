"""From moments of many repeats to the time of each tensor, so that sums are the measured totals.

All moments of one repeat count from the start of its half-step, medians are taken of moments, and
times are differences of medians: nothing is lost or counted twice. Moments of a repeat are made
non-decreasing first, and medians keep an order that holds in every repeat, so no time is negative.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray


def forward_shares_s(begins_s: ArrayLike, totals_s: ArrayLike) -> NDArray[np.float64]:
    """Time of each layer: from its first start to the first start of the next new layer.

    Work without tensors of its own (activations, pooling, a layer that runs again) so counts for
    the layer before it: nothing in it waits for parameters that are not there already. The last
    layer's time holds the loss, the first layer's also what ran before it.

    Args:
        begins_s: [repeats, layers], NaN where a layer did not run in a repeat.
        totals_s: [repeats], of forward and loss.

    Returns:
        [layers] seconds, their sum the median total.

    Example:
        >>> forward_shares_s([[1.0, 3.0]], [7.0]).tolist()
        [3.0, 4.0]
    """
    moments = _median_moments(np.asarray(begins_s, dtype=float), totals_s)
    moments[0] = 0.0
    shares: NDArray[np.float64] = np.diff(moments)
    return shares


def backward_times_s(ready_s: ArrayLike, totals_s: ArrayLike) -> NDArray[np.float64]:
    """Time of each tensor: from the readiness of the one behind it in forward order to its own.

    A tensor counts as ready when all those behind it are, R_l = max over k >= l of its own R_k:
    where a gradient overtakes those behind it, its time is 0. The first tensor's time holds what
    the backward pass did after the last gradient.

    Args:
        ready_s: [repeats, tensors] in forward order, NaN where no gradient came.
        totals_s: [repeats], of the backward pass.

    Returns:
        [tensors] seconds, their sum the median total.

    Example:
        >>> backward_times_s([[5.0, 3.0, 4.0]], [7.0]).tolist()
        [3.0, 0.0, 4.0]
    """
    backwards = np.asarray(ready_s, dtype=float)[:, ::-1]
    moments = _median_moments(backwards, totals_s)
    ends = np.append(moments[:-2], moments[-1])
    return np.diff(ends, prepend=0.0)[::-1]


def _median_moments(moments_s: NDArray[np.float64], totals_s: ArrayLike) -> NDArray[np.float64]:
    """[columns + 1]: medians of the non-decreasing moments and of the total behind them."""
    ends = np.asarray(totals_s, dtype=float)[:, None]
    known = np.fmax(np.fmax.accumulate(moments_s, axis=1), 0.0)
    result: NDArray[np.float64] = np.median(np.hstack([np.fmin(known, ends), ends]), axis=0)
    return result


def spread(shares_s: Sequence[float], owners: Sequence[Sequence[int]], count: int) -> list[float]:
    """A layer's time goes to the first of its tensors, the others have none.

    Example:
        >>> spread([3.0, 4.0], [(0, 1), (2,)], 4)
        [3.0, 0.0, 4.0, 0.0]
    """
    times = [0.0] * count
    for share, tensors in zip(shares_s, owners, strict=True):
        times[tensors[0]] = float(share)
    return times
