"""`testbed.link/1`: the time of one exchange among n workers on a backend."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

LINK_SCHEMA: Final = "testbed.link/1"
PROCESSOR_TIMES: Final = ("submit_s", "landing_s", "thread_s")  # fields of a link


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """A range of message sizes with one linear cost.

    Attributes:
        max_bytes: the largest size of the range; None = no limit.
        latency_s: start-up time.
        seconds_per_byte: time of one more byte.
    """

    max_bytes: float | None = None
    latency_s: float
    seconds_per_byte: float


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of a sum over the workers: T(M) = latency_s + M seconds_per_byte, T(0) = 0.

    Attributes:
        backend: it was measured on.
        num_workers: n; among one worker every message takes 0 s.
        latency_s: start-up time a.
        seconds_per_byte: b.
        concurrency_slowdown: factor on the transfer time of each of k = 1, 2, ... messages under
            way at once; None = k (no gain from concurrency).
        submit_s: processor time of the computing thread to submit one message; compute stands
            still for it (LogP's o). 0 in files that are older than this key.
        landing_s: processor time of the computing thread to take one result.
        thread_s: processor time of the backend's own threads for one message, polling included. It
            is told, not charged: it is part of the start-up time already.
        pieces: a piecewise fit; None = one linear piece.
        extra: keys of the file that this version does not know, kept for a round trip.
    """

    backend: str
    num_workers: int
    latency_s: float
    seconds_per_byte: float
    concurrency_slowdown: tuple[float, ...] | None = None
    submit_s: float = 0.0
    landing_s: float = 0.0
    thread_s: float = 0.0
    pieces: tuple[Piece, ...] | None = None
    extra: dict[str, Any] = {}

    def piece(self, num_bytes: float) -> Piece:
        """The piece that a message of this size belongs to."""
        if not self.pieces:
            return Piece(latency_s=self.latency_s, seconds_per_byte=self.seconds_per_byte)
        limits = [float("inf") if p.max_bytes is None else p.max_bytes for p in self.pieces]
        return self.pieces[min(bisect_left(limits, num_bytes), len(limits) - 1)]

    def time_s(self, num_bytes: float) -> float:
        """Seconds of one message alone on the link.

        Example:
            >>> link = Link(backend="x", num_workers=2, latency_s=1e-3, seconds_per_byte=1e-9)
            >>> link.time_s(1_000_000), link.time_s(0)
            (0.002, 0.0)
        """
        if num_bytes <= 0 or self.num_workers == 1:
            return 0.0
        piece = self.piece(num_bytes)
        return piece.latency_s + num_bytes * piece.seconds_per_byte

    def slowdown(self, num_messages: int) -> float:
        """Factor on the transfer time of each of so many concurrent messages.

        Beyond the measured counts it grows in proportion, as on a link that is full.
        """
        table = self.concurrency_slowdown
        if not table:
            return float(num_messages)
        if num_messages <= len(table):
            return table[num_messages - 1]
        return table[-1] * num_messages / len(table)


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
