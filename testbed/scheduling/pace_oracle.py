"""What a largest-tail-first schedule of given tensors comes to; the oracle of PACE's fusion.

A job is a tensor, or several fused, with its release (gradient ready), its tail (compute that waits
for it) and its segments. Fixed rule: of the released jobs the one with the largest tail is sent;
one that is more urgent takes over at the end of the running segment, or, with ideal preemption, at
once and for free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from testbed.base.link import Link


class Job(NamedTuple):
    """What is sent as one: `num_full` segments of `full_s` each, then one of `last_s`."""

    release_s: float
    tail_s: float
    num_full: int
    full_s: float
    last_s: float

    @property
    def total_s(self) -> float:
        """Time of all its segments."""
        return self.num_full * self.full_s + self.last_s

    @property
    def longest_s(self) -> float:
        """Time of its longest segment."""
        return max(self.full_s if self.num_full else 0.0, self.last_s)


@dataclass(frozen=True)
class Tensors:
    """Tensors in the order of their release, and what sending them costs.

    Attributes:
        release_s: when each is ready; never decreases.
        tail_s: forward time from its first reader to the end.
        num_bytes: of each.
        dtypes: of each; only equal ones are fused.
        link: gives the cost of a segment, one start-up time for each.
        segment_bytes: None = a message is not cut; also bounds what is fused.
        compute_s: backward and forward, the least that an iteration takes.
    """

    release_s: Sequence[float]
    tail_s: Sequence[float]
    num_bytes: Sequence[int]
    dtypes: Sequence[str]
    link: Link
    segment_bytes: int | None
    compute_s: float

    def __len__(self) -> int:
        return len(self.release_s)

    def job(self, start: int, stop: int) -> Job:
        """Tensors start .. stop - 1 as one job: release and tail are the largest, sizes add up.

        No cycle can arise from fusing: releases lie in backward, first readers in the forward pass
        behind it.
        """
        size = sum(self.num_bytes[start:stop])
        num_full, full_s, rest = 0, 0.0, size
        if self.segment_bytes is not None and size > self.segment_bytes:
            num_full, rest = divmod(size, self.segment_bytes)
            full_s = self.link.time_s(self.segment_bytes)
        return Job(
            max(self.release_s[start:stop]),
            max(self.tail_s[start:stop]),
            num_full,
            full_s,
            self.link.time_s(rest),
        )

    def first_partner(self, stop: int, window: int) -> int:
        """The first tensor that can be fused with all up to `stop` - 1."""
        start = stop - 1
        size = self.num_bytes[start]
        for other in range(stop - 2, max(-1, stop - 1 - window), -1):
            size += self.num_bytes[other]
            too_large = self.segment_bytes is not None and size > self.segment_bytes
            if too_large or self.dtypes[other] != self.dtypes[start]:
                break
            start = other
        return start


Waiting = list[tuple[float, int, int, float]]


class Channel(NamedTuple):
    """The state of a schedule: free from `now_s`, what waits, and the largest C + q so far.

    `waiting` is a heap of (-tail, order of arrival, segments left, time of each).
    """

    now_s: float
    worst_s: float
    waiting: Waiting
    num_arrived: int


def arrive(channel: Channel, job: Job, ideal: bool) -> Channel:
    """The state after the channel has worked until the job's release and the job has joined."""
    waiting = channel.waiting.copy()
    now_s, worst_s = work(waiting, channel.now_s, channel.worst_s, job.release_s, ideal)
    number = push(waiting, job, channel.num_arrived, ideal)
    return Channel(max(now_s, job.release_s), worst_s, waiting, number)


def finish_s(jobs: Iterable[Job], compute_s: float, ideal: bool) -> float:
    """End of the next forward pass under the schedule: max(t_b + sum t_f, max(C_i + q_i)).

    With ideal preemption the schedule is optimal (Baker, Lawler, Lenstra and Rinnooy Kan, 1983);
    with segments it is a heuristic. O(n log n).

    Args:
        jobs: in the order of their release.
        compute_s: backward and forward time.
        ideal: preempt at any moment for free; else at the ends of segments.

    Example:
        >>> jobs = [Job(2, 1, 0, 0, 9), Job(4, 7, 0, 0, 2)]
        >>> finish_s(jobs, 10, ideal=True), finish_s(jobs, 10, ideal=False)
        (14, 20)
    """
    waiting: Waiting = []
    now_s, worst_s, number = 0.0, float(compute_s), 0
    for job in jobs:
        now_s, worst_s = work(waiting, now_s, worst_s, job.release_s, ideal)
        now_s = max(now_s, job.release_s)
        number = push(waiting, job, number, ideal)
    return work(waiting, now_s, worst_s, inf, ideal)[1]


def push(waiting: Waiting, job: Job, number: int, ideal: bool) -> int:
    """Add a job's segments; returns the next free number."""
    if ideal:
        heappush(waiting, (-job.tail_s, number, 1, job.total_s))
        return number + 1
    if job.num_full:
        heappush(waiting, (-job.tail_s, number, job.num_full, job.full_s))
        number += 1
    heappush(waiting, (-job.tail_s, number, 1, job.last_s))
    return number + 1


def work(
    waiting: Waiting, now_s: float, worst_s: float, until_s: float, ideal: bool
) -> tuple[float, float]:
    """Send what waits, most urgent first, until `until_s` or the end of the segment under way.

    Changes `waiting`; returns the new time and the new largest C + q.
    """
    while waiting and now_s < until_s:
        negative_tail_s, number, count, segment_s = waiting[0]
        if ideal and now_s + segment_s > until_s:
            left_s = segment_s - (until_s - now_s)
            waiting[0] = (negative_tail_s, number, 1, left_s)
            return until_s, worst_s
        sent = 1 if count == 1 else segments_until(until_s - now_s, count, segment_s)
        now_s += sent * segment_s
        if sent < count:
            waiting[0] = (negative_tail_s, number, count - sent, segment_s)
            continue
        heappop(waiting)
        worst_s = max(worst_s, now_s - negative_tail_s)
    return now_s, worst_s


def drain(waiting: Waiting, now_s: float, worst_s: float) -> float:
    """The largest C + q once all that waits has been sent; as `work` without an end, but faster.

    Changes `waiting`.
    """
    waiting.sort()
    for negative_tail_s, _, count, segment_s in waiting:
        now_s += count * segment_s
        through_s = now_s - negative_tail_s
        if through_s > worst_s:
            worst_s = through_s
    return worst_s


def segments_until(time_s: float, count: int, segment_s: float) -> int:
    """The fewest segments that last for so long, at most `count`.

    Example:
        >>> segments_until(7, 10, 3), segments_until(6, 10, 3), segments_until(99, 10, 3)
        (3, 2, 10)
    """
    if count * segment_s <= time_s:
        return count
    sent = max(1, int(time_s / segment_s))
    return sent if sent * segment_s >= time_s else sent + 1
