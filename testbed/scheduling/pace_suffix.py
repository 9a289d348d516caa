"""The segmented schedule of a candidate grouping, simulated from where its prefix left off."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappush
from math import inf

from testbed.scheduling.pace_bounds import Floats
from testbed.scheduling.pace_oracle import Channel, Job, Tensors, arrive, drain, work

ROUNDING = 1 + 1e-12

# When a tensor is released, and (-tail, number, time of each) of its full segments and of the last.
Segments = tuple[float, list[tuple[float, int, float]]]


def segments_of(job: Job) -> Segments:
    """A job in the form in which the inner loop hands it to the channel, as `push` does."""
    full = [(-job.tail_s, job.num_full, job.full_s)] if job.num_full else []
    return job.release_s, [*full, (-job.tail_s, 1, job.last_s)]


class Suffix:
    """Simulates prefixes of groups with the unfused tensors behind them.

    A simulation ends early at the first idle moment, from where on all schedules are the same, and
    as soon as it is worse than a known one.

    Args:
        tensors: all of them.
    """

    def __init__(self, tensors: Tensors) -> None:
        count = len(tensors)
        self._singles = [tensors.job(i, i + 1) for i in range(count)]
        self._segments = [segments_of(job) for job in self._singles]
        self._states = {0: Channel(0.0, tensors.compute_s, [], 0)}
        self._from_idle_s = {count: 0.0}

    def advance(self, start: int, until_s: float) -> Channel:
        """Let the schedule of the first `start` tensors go on until a moment; returns its state."""
        now_s, worst_s, waiting, number = self._states[start]
        now_s, worst_s = work(waiting, now_s, worst_s, until_s, ideal=False)
        self._states[start] = Channel(max(now_s, until_s), worst_s, waiting, number)
        return self._states[start]

    def keep(self, start: int, stop: int, job: Job, window: int) -> None:
        """Remember the schedule of the first `stop` tensors, whose last group is this job."""
        self._states[stop] = arrive(self._states[start], job, ideal=False)
        self._states.pop(stop - window, None)

    def best(
        self,
        first: int,
        jobs: Sequence[Job],
        order: Sequence[int],
        bounds_s: tuple[Floats, Floats],
        alone_s: Floats,
    ) -> tuple[int, float]:
        """The candidate of the smallest value, and that value.

        Args:
            first: the tensor with which candidate 0's group starts; candidate c's is first + c.
            jobs: the groups; all end with the same tensor.
            order: candidates by lower bound, then `alone_s`, then index.
            bounds_s: lower and upper bound of each.
            alone_s: decides between equal values, then the index does.
        """
        low_s, high_s = bounds_s
        stop = first + len(jobs)
        cut_s = float(high_s.min())
        best: tuple[float, float, int] = (inf, inf, len(jobs))
        for c in order:
            if low_s[c] > cut_s * ROUNDING:
                break
            if (low_s[c], alone_s[c], c) >= best:
                continue
            value_s = float(low_s[c])
            if low_s[c] < high_s[c]:
                value_s = self._value_s(first + c, jobs[c], stop, cut_s * ROUNDING)
            best = min(best, (value_s, float(alone_s[c]), int(c)))
            cut_s = min(cut_s, value_s)
        return best[2], best[0]

    def _value_s(self, start: int, job: Job, stop: int, cut_s: float) -> float:
        """The value with this job behind the first `start` tensors; infinity if above the cut."""
        state = arrive(self._states[start], job, ideal=False)
        idle, worst_s = self._run(state, stop, cut_s)
        return inf if worst_s > cut_s else max(worst_s, self._idle_value_s(idle))

    def _run(self, state: Channel, position: int, cut_s: float) -> tuple[int, float]:
        """Send until the channel is idle when a tensor gets ready: that tensor, largest C + q."""
        now_s, worst_s, waiting, number = state
        for index in range(position, len(self._singles)):
            release_s, segments = self._segments[index]
            if now_s < release_s:
                now_s, worst_s = work(waiting, now_s, worst_s, release_s, ideal=False)
                if not waiting and now_s <= release_s:
                    return index, worst_s
            if worst_s > cut_s:
                return index, worst_s
            for negative_tail_s, count, segment_s in segments:
                heappush(waiting, (negative_tail_s, number, count, segment_s))
                number += 1
        return len(self._singles), drain(waiting, now_s, worst_s)

    def _idle_value_s(self, position: int) -> float:
        """Largest C + q of the unfused tensors from here on, on a channel that is idle."""
        passed: list[tuple[int, float]] = []
        while position not in self._from_idle_s:
            job = self._singles[position]
            state = arrive(Channel(0.0, 0.0, [], 0), job, ideal=False)
            idle, worst_s = self._run(state, position + 1, inf)
            passed.append((position, worst_s))
            position = idle
        value_s = self._from_idle_s[position]
        for index, worst_s in reversed(passed):
            value_s = max(value_s, worst_s)
            self._from_idle_s[index] = value_s
        return value_s
