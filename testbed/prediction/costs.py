"""Parts of one exchange's time, for one size and for many at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from testbed.prediction.link import Link

Floats = NDArray[np.float64]


def phases_s(link: Link, num_bytes: float) -> tuple[float, float]:
    """Start-up and transfer time of one message alone on the link; both 0 without bytes.

    Example:
        >>> link = Link(backend="x", num_workers=2, latency_s=1e-3, seconds_per_byte=1e-9)
        >>> phases_s(link, 1_000_000)
        (0.001, 0.001)
    """
    if num_bytes <= 0 or link.num_workers == 1:
        return 0.0, 0.0
    piece = link.piece(num_bytes)
    return piece.latency_s, num_bytes * piece.seconds_per_byte


def merge_gain_s(link: Link) -> float:
    """What merging two messages saves: the start-up time a, as T(x) + T(y) - T(x + y) = a.

    With a piecewise link the gain depends on the sizes; the papers' rules know one number, the
    link's `latency_s`, and get that.
    """
    return 0.0 if link.num_workers == 1 else link.latency_s


def times_s(link: Link, num_bytes: Floats) -> Floats:
    """`link.time_s` of each size, bit for bit the same.

    Example:
        >>> link = Link(backend="x", num_workers=2, latency_s=1e-3, seconds_per_byte=1e-9)
        >>> times_s(link, np.array([0.0, 1e6])).tolist()
        [0.0, 0.002]
    """
    if link.num_workers == 1:
        return np.zeros(num_bytes.shape)
    if not link.pieces:
        cost = link.latency_s + num_bytes * link.seconds_per_byte
    else:
        limits = [np.inf if p.max_bytes is None else p.max_bytes for p in link.pieces]
        found = np.searchsorted(limits, num_bytes, side="left").clip(max=len(limits) - 1)
        latency_s = np.array([p.latency_s for p in link.pieces])[found]
        cost = latency_s + num_bytes * np.array([p.seconds_per_byte for p in link.pieces])[found]
    return np.where(num_bytes > 0, cost, 0.0)
