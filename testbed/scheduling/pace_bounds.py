"""Bounds on largest-tail-first schedules, for many candidate groupings at once.

With ideal preemption jobs of tail >= q never notice the others. So with B_q the end of the busy
time of those jobs alone, sent in any order without pauses,

    max over i of (C_i + q_i) = max over q of (B_q + q)

and B_q grows job by job as max(B_q, release) + time: a vector over all thresholds q is all that a
prefix of the schedule leaves behind. With segments a busy time starts late by at most the longest
segment of smaller tail, which bounds the schedule from above.

Letters of shapes: W candidates, T thresholds of tails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from testbed.scheduling.pace_oracle import Job, Tensors

Floats = NDArray[np.float64]

ROWS_PER_BLOCK = 64


class Row(NamedTuple):
    """The effect on the end B of a busy time: B -> max(B + added_s, least_s); (T,) each.

    `least_s` is minus infinity where no tensor is at or above the threshold.
    """

    added_s: Floats
    least_s: Floats


class Rest:
    """For each position the effect of the tensors behind it, if they stay unfused.

    Computed backwards. Only each 64th row is kept; the others are computed again when their block
    is asked for, so that memory grows with n^1.5 and not with n^2. Ask for positions in increasing
    order.

    Args:
        singles: the unfused tensors.
        thresholds_s: (T,) distinct tails, increasing.
    """

    def __init__(self, singles: Sequence[Job], thresholds_s: Floats) -> None:
        self._singles = singles
        self._urgent = [
            int(np.searchsorted(thresholds_s, job.tail_s, side="right")) for job in singles
        ]
        count = len(thresholds_s)
        row = Row(np.zeros(count), np.full(count, -np.inf))
        self._kept = {len(singles): row}
        self._block: dict[int, Row] = {}
        longest_s = np.zeros(count + 1)
        self._blocking_s: dict[int, Floats] = {}
        for position in range(len(singles) - 1, -1, -1):
            row = self._before(position, row)
            job, urgent = singles[position], self._urgent[position]
            longest_s[urgent] = max(longest_s[urgent], job.longest_s)
            if position % ROWS_PER_BLOCK == 0:
                self._kept[position] = row
                self._blocking_s[position] = np.maximum.accumulate(longest_s)[:-1]

    def row(self, position: int) -> Row:
        """The row of tensors `position` and on."""
        if position in self._kept:
            return self._kept[position]
        if position not in self._block:
            start = position - position % ROWS_PER_BLOCK
            last = min(len(self._singles), start + ROWS_PER_BLOCK)
            row, self._block = self._kept[last], {}
            for p in range(last - 1, position - 1, -1):
                row = self._before(p, row)
                self._block[p] = row
        return self._block[position]

    def blocking_s(self, position: int) -> Floats:
        """(T,) at least the longest segment below each threshold of tensors `position` and on."""
        start = min(position, len(self._singles) - 1)
        return self._blocking_s[start - start % ROWS_PER_BLOCK]

    def _before(self, position: int, row: Row) -> Row:
        job, urgent = self._singles[position], self._urgent[position]
        added_s, least_s = row.added_s.copy(), row.least_s.copy()
        added_s[:urgent] += job.total_s
        np.maximum(least_s[:urgent], job.release_s + added_s[:urgent], out=least_s[:urgent])
        return Row(added_s, least_s)


@dataclass(frozen=True)
class Prefix:
    """What a grouping of the first tensors has left to send; minus infinity where there is nothing.

    Attributes:
        busy_s: (T,) end of the busy time of the jobs at or above each threshold.
        blocking_s: (T,) longest segment of the jobs below each threshold.
        free_s: with segments: when the segment under way ends; with ideal preemption 0.
        worst_s: with segments: largest C + q of what has ended; with ideal preemption 0.
    """

    busy_s: Floats
    blocking_s: Floats
    free_s: float = 0.0
    worst_s: float = 0.0

    def advanced(self, free_s: float, worst_s: float, idle: bool) -> Prefix:
        """The same after some segments have been sent; `idle` if all have."""
        busy_s = np.where(self.busy_s >= free_s, self.busy_s, -np.inf)
        blocking_s = np.zeros_like(self.blocking_s) if idle else self.blocking_s
        return Prefix(busy_s, blocking_s, free_s, worst_s)


@dataclass(frozen=True)
class Grown:
    """Prefixes, each with one job more: (W, T), and (W, 1) for the numbers."""

    busy_s: Floats
    blocking_s: Floats
    free_s: Floats
    worst_s: Floats

    def row(self, index: int) -> Prefix:
        """The prefix of one candidate."""
        return Prefix(
            self.busy_s[index].copy(),
            self.blocking_s[index].copy(),
            float(self.free_s[index, 0]),
            float(self.worst_s[index, 0]),
        )


class Bounds:
    """Lower and upper bounds of a prefix of groups followed by unfused tensors.

    Args:
        tensors: all of them.
        ideal: preemption at any moment; the bounds are then the value itself.
    """

    def __init__(self, tensors: Tensors, ideal: bool) -> None:
        self._compute_s = tensors.compute_s
        self._ideal = ideal
        self._thresholds_s = np.unique(np.asarray(tensors.tail_s, dtype=np.float64))
        self._rest = Rest([tensors.job(i, i + 1) for i in range(len(tensors))], self._thresholds_s)

    def empty(self) -> Prefix:
        """Before the first job."""
        count = len(self._thresholds_s)
        return Prefix(np.full(count, -np.inf), np.zeros(count))

    def grow(self, prefixes: Sequence[Prefix], jobs: Sequence[Job]) -> Grown:
        """Each prefix with its job, released now, behind it."""
        busy_s = np.stack([p.busy_s for p in prefixes])
        blocking_s = np.stack([p.blocking_s for p in prefixes])
        start_s = np.array(
            [[max(p.free_s, job.release_s)] for p, job in zip(prefixes, jobs, strict=True)]
        )
        total_s = np.array([[job.total_s] for job in jobs])
        longest_s = np.array([[job.longest_s] for job in jobs])
        urgent = self._thresholds_s <= np.array([[job.tail_s] for job in jobs])
        return Grown(
            np.where(urgent, np.maximum(busy_s, start_s) + total_s, busy_s),
            np.where(urgent, blocking_s, np.maximum(blocking_s, longest_s)),
            np.array([[p.free_s] for p in prefixes]),
            np.array([[p.worst_s] for p in prefixes]),
        )

    def alone(self, grown: Grown) -> Floats:
        """(W,) largest C + q if only the prefix were sent."""
        left_s = (grown.busy_s + self._thresholds_s).max(axis=1)
        return np.asarray(np.maximum(left_s, grown.worst_s[:, 0]))

    def around(self, grown: Grown, stop: int) -> tuple[Floats, Floats]:
        """(W,) lower and upper bounds with tensors `stop` and on unfused behind the prefix.

        They are equal where the value is certain, which with ideal preemption it always is.
        """
        rest = self._rest.row(stop)
        end_s = np.maximum(grown.busy_s + rest.added_s, rest.least_s)
        if not self._ideal:
            coming_s = np.where(rest.least_s > -np.inf, rest.added_s, -np.inf)
            np.maximum(end_s, grown.free_s + coming_s, out=end_s)
        end_s += self._thresholds_s
        floor_s = np.maximum(grown.worst_s[:, 0], self._compute_s)
        low_s = np.maximum(end_s.max(axis=1), floor_s)
        if self._ideal:
            return low_s, low_s
        end_s += np.maximum(grown.blocking_s, self._rest.blocking_s(stop))
        return low_s, np.maximum(end_s.max(axis=1), floor_s)
