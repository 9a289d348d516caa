"""Bounds on largest-tail-first schedules, for many candidate groupings at once.

With ideal preemption jobs of tail >= q never notice the others. So with B_q the end of the busy
time of those jobs alone, sent in any order without pauses,

    max over i of (C_i + q_i) = max over q of (B_q + q)

and B_q grows job by job as max(B_q, release) + time: a vector over all thresholds q is all that a
prefix of the schedule leaves behind. With segments a busy time starts late by at most the longest
segment of smaller tail, which bounds the schedule from above.

Letters of shapes: W candidates, T thresholds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from testbed.scheduling.pace_oracle import Job, Tensors

Floats = NDArray[np.float64]
ROWS_PER_BLOCK = 64


@dataclass(frozen=True)
class Prefix:
    """What a grouping of the first tensors leaves behind.

    Attributes:
        busy_s: (T,) end of the busy time of the jobs at or above each threshold.
        blocking_s: (T,) longest segment of the jobs below each threshold.
    """

    busy_s: Floats
    blocking_s: Floats


@dataclass(frozen=True)
class Grown:
    """Prefixes, each with one job more; (W, T) each."""

    busy_s: Floats
    blocking_s: Floats

    def row(self, index: int) -> Prefix:
        """The prefix of one candidate."""
        return Prefix(self.busy_s[index].copy(), self.blocking_s[index].copy())


class Bounds:
    """Lower and upper bounds of a prefix of groups followed by unfused tensors.

    Args:
        tensors: all of them.
    """

    def __init__(self, tensors: Tensors) -> None:
        self._compute_s = tensors.compute_s
        self._thresholds_s = np.unique(np.asarray(tensors.tail_s, dtype=np.float64))
        singles = [tensors.job(i, i + 1) for i in range(len(tensors))]
        self._rest = _Rest(singles, self._thresholds_s)
        longest_s = np.zeros(len(self._thresholds_s) + 1)
        for job in singles:
            below = np.searchsorted(self._thresholds_s, job.tail_s, side="right")
            longest_s[below] = max(longest_s[below], job.longest_s)
        self._blocking_s = np.maximum.accumulate(longest_s)[:-1]

    def empty(self) -> Prefix:
        """Before the first job."""
        zeros = np.zeros(len(self._thresholds_s))
        return Prefix(zeros, zeros)

    def grow(self, prefixes: Sequence[Prefix], jobs: Sequence[Job]) -> Grown:
        """Each prefix with its job behind it."""
        busy_s = np.stack([p.busy_s for p in prefixes])
        blocking_s = np.stack([p.blocking_s for p in prefixes])
        released = np.array([[job.release_s] for job in jobs])
        total_s = np.array([[job.total_s] for job in jobs])
        longest_s = np.array([[job.longest_s] for job in jobs])
        tails_s = np.array([[job.tail_s] for job in jobs])
        urgent = self._thresholds_s <= tails_s
        return Grown(
            np.where(urgent, np.maximum(busy_s, released) + total_s, busy_s),
            np.where(urgent, blocking_s, np.maximum(blocking_s, longest_s)),
        )

    def alone(self, grown: Grown) -> Floats:
        """(W,) end of the forward pass if only the prefix were sent, preempted ideally."""
        sent = np.where(grown.busy_s > 0, grown.busy_s + self._thresholds_s, 0.0)
        return np.asarray(sent.max(axis=1))

    def around(self, grown: Grown, stop: int, ideal: bool) -> tuple[Floats, Floats]:
        """(W,) lower and upper bounds with tensors `stop` and on unfused behind the prefix.

        Both are the value itself with ideal preemption, and equal where the value is certain.
        """
        added_s, least_s = self._rest.row(stop)
        end_s = np.maximum(grown.busy_s + added_s, least_s) + self._thresholds_s
        low_s = np.maximum(end_s.max(axis=1), self._compute_s)
        if ideal:
            return low_s, low_s
        end_s += np.maximum(grown.blocking_s, self._blocking_s)
        return low_s, np.maximum(end_s.max(axis=1), self._compute_s)


class _Rest:
    """What the unfused tensors from each position on do to a busy time: B -> max(B + P, S).

    The rows of P and S are worked out backwards; only each 64th is kept, the others come anew when
    their block is asked for, so that memory grows with n^1.5 and not with n^2.
    """

    def __init__(self, singles: Sequence[Job], thresholds_s: Floats) -> None:
        self._singles = singles
        self._urgent = [
            int(np.searchsorted(thresholds_s, job.tail_s, side="right")) for job in singles
        ]
        self._kept: dict[int, tuple[Floats, Floats]] = {}
        self._block: dict[int, tuple[Floats, Floats]] = {}
        row = (np.zeros(len(thresholds_s)), np.zeros(len(thresholds_s)))
        self._kept[len(singles)] = row
        for position in range(len(singles) - 1, -1, -1):
            row = self._before(position, row)
            if position % ROWS_PER_BLOCK == 0:
                self._kept[position] = row

    def row(self, position: int) -> tuple[Floats, Floats]:
        """P and S, (T,) each, of tensors `position` and on."""
        if position in self._kept:
            return self._kept[position]
        if position not in self._block:
            last = min(len(self._singles), position - position % ROWS_PER_BLOCK + ROWS_PER_BLOCK)
            row = self._kept[last]
            self._block = {}
            for p in range(last - 1, position - 1, -1):
                row = self._before(p, row)
                self._block[p] = row
        return self._block[position]

    def _before(self, position: int, row: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
        job, urgent = self._singles[position], self._urgent[position]
        added_s, least_s = row[0].copy(), row[1].copy()
        added_s[:urgent] += job.total_s
        np.maximum(least_s[:urgent], job.release_s + added_s[:urgent], out=least_s[:urgent])
        return added_s, least_s
