"""PACE: largest tail first with preemption, small tensors fused (a reconstruction)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappush
from itertools import pairwise
from math import inf
from typing import Literal

import numpy as np

from testbed.base.axes import SchedulerFacts
from testbed.base.errors import UsageError
from testbed.base.knobs import Grid, Range
from testbed.base.link import Link
from testbed.base.parts import RECONSTRUCTION, Part
from testbed.base.plan import Message, Plan, TensorSlice
from testbed.base.trace import Trace
from testbed.base.units import format_bytes, format_seconds
from testbed.prediction.cross_iteration import describe_order, tails_s
from testbed.scheduling.build import (
    elements_in,
    priority_plan,
    require_few_messages,
    require_positive,
    slices_of,
)
from testbed.scheduling.pace_bounds import Bounds, Floats
from testbed.scheduling.pace_oracle import Channel, Job, Tensors, arrive, drain, finish_s, work
from testbed.scheduling.processor_time import with_processor_time

# The segmented schedule of a candidate grouping, simulated from where its prefix left off.

ROUNDING = 1 + 1e-12

# When a tensor is released, and (-tail, number, time of each) of its full segments and of the last.
Segments = tuple[float, list[tuple[float, int, float]]]


def segments_of(job: Job) -> Segments:
    """A job as the inner loop pushes it onto the heap of the channel."""
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
        """Continue the schedule of the first `start` tensors up to a moment; returns its state."""
        now_s, worst_s, waiting, number = self._states[start]
        now_s, worst_s = work(waiting, now_s, worst_s, until_s, ideal=False)
        self._states[start] = Channel(max(now_s, until_s), worst_s, waiting, number)
        return self._states[start]

    def keep(self, start: int, stop: int, job: Job, window: int) -> None:
        """Store the schedule of the first `stop` tensors, whose last group is this job."""
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


# PACE's fusion: a dynamic program over contiguous groups, with the preemptive schedule as oracle.
#
#     F[j] = argmin over i < j of Oracle(F[i] + fuse(i+1 .. j) + the tensors behind j, unfused)
#
# Of groups that come to the same time the one is kept whose prefix alone ends earliest, then the
# longest. `fuse_plainly` asks the oracle anew each time, O(n^2 W log n); `fuse` finds the same
# values from bounds over all thresholds of tails at once, and simulates only where the bounds
# leave doubt.


@dataclass(frozen=True)
class Fusion:
    """Groups of tensors in the order of their release.

    Attributes:
        stops: where each group ends, the last one n.
        values_s: the oracle's value of F[1], ..., F[n].
    """

    stops: list[int]
    values_s: list[float]

    @classmethod
    def of(cls, chosen: list[int], values_s: list[float]) -> Fusion:
        """The groups behind the choices: group (chosen[j], j] ends the best fusion of j tensors."""
        stops: list[int] = []
        stop = len(values_s)
        while stop > 0:
            stops.append(stop)
            stop = chosen[stop]
        return cls(stops[::-1], values_s)


def jobs_of(tensors: Tensors, stops: list[int]) -> list[Job]:
    """The jobs of these groups."""
    return [tensors.job(start, stop) for start, stop in pairwise([0, *stops])]


def fuse_plainly(tensors: Tensors, window: int, ideal: bool) -> Fusion:
    """The dynamic program with an oracle call for each candidate: the slow reference of `fuse`.

    Args:
        tensors: to be grouped.
        window: most tensors of a group.
        ideal: the oracle's preemption, see `finish_s`.
    """
    count = len(tensors)
    # Segments already sent count from the compute time on; with ideal preemption none are sent.
    floor_s = 0.0 if ideal else tensors.compute_s
    best: list[list[int]] = [[]]
    values_s: list[float] = []
    for stop in range(1, count + 1):
        singles = list(range(stop + 1, count + 1))
        candidates = []
        for start in range(tensors.first_partner(stop, window), stop):
            stops = [*best[start], stop]
            value_s = finish_s(jobs_of(tensors, stops + singles), tensors.compute_s, ideal)
            alone_s = finish_s(jobs_of(tensors, stops), floor_s, ideal)
            candidates.append((value_s, alone_s, start, stops))
        chosen = min(candidates)
        best.append(chosen[3])
        values_s.append(chosen[0])
    return Fusion(best[count], values_s)


def fuse(tensors: Tensors, window: int, ideal: bool) -> Fusion:
    """The same groups as `fuse_plainly`, whose arguments it has, from bounds and few simulations.

    Exact on chains with ideal preemption; with other forward orders or with segments it is a
    heuristic that never ends above the unfused oracle.

    Reference:
        Bao, Peng, Chen and Wu, 2020, INFOCOM (PACE): fusion by dynamic programming with the best
        preemptive schedule as oracle. Departs: a reconstruction from the abstract; the order of the
        program, the window, and the cost and size of segments are ours.
    """
    count = len(tensors)
    bounds = Bounds(tensors, ideal)
    suffix = None if ideal else Suffix(tensors)
    prefixes = {0: bounds.empty()}
    chosen, values_s = [0], []
    for stop in range(1, count + 1):
        first = tensors.first_partner(stop, window)
        jobs = [tensors.job(start, stop) for start in range(first, stop)]
        if suffix is not None:
            for start in range(first, stop):
                state = suffix.advance(start, tensors.release_s[stop - 1])
                prefixes[start] = prefixes[start].advanced(
                    state.now_s, state.worst_s, idle=not state.waiting
                )
        grown = bounds.grow([prefixes[i] for i in range(first, stop)], jobs)
        low_s, high_s = bounds.around(grown, stop)
        alone_s = bounds.alone(grown)
        order = np.lexsort((np.arange(len(jobs)), alone_s, low_s)).tolist()
        if suffix is None:
            best, value_s = order[0], float(low_s[order[0]])
        else:
            best, value_s = suffix.best(first, jobs, order, (low_s, high_s), alone_s)
            suffix.keep(first + best, stop, jobs[best], window)
        prefixes[stop] = grown.row(best)
        prefixes.pop(stop - window, None)
        chosen.append(first + best)
        values_s.append(value_s)
    return Fusion.of(chosen, values_s)


LARGEST_ELEMENT_BYTES = 8


@dataclass(frozen=True)
class PaceOptions:
    """Options of `pace`.

    Attributes:
        segment_kib: a message can be overtaken every so many KiB, and small tensors are fused up to
            as many; 0 = a message is never cut and fusion is bounded by the window alone.
        window: most tensors of a fused message; 1 = none are fused.
        credit_kib: bytes under way before the next choice waits; 0 = one segment at a time.
        oracle: preemption that fusion is planned for: between segments, as it is carried out, or
            `ideal`, at any moment and for free.
    """

    segment_kib: float = 4096
    window: int = 16
    credit_kib: float = 0
    oracle: Literal["segmented", "ideal"] = "segmented"

    def __post_init__(self) -> None:
        require_positive("pace", window=self.window)
        for name in ("segment_kib", "credit_kib"):
            value = getattr(self, name)
            if not 0 <= value < 1e300:  # in bytes it is finite, too
                raise UsageError(f"pace: {name} is {value}; expected 0 or a number of KiB")

    @property
    def segment_bytes(self) -> int | None:
        """Whole elements of any type, so that costs and messages agree; None = not cut."""
        if self.segment_kib == 0:
            return None
        elements = int(self.segment_kib * 1024) // LARGEST_ELEMENT_BYTES
        return max(1, elements) * LARGEST_ELEMENT_BYTES


def plan_pace(trace: Trace, link: Link, options: PaceOptions) -> Plan:
    """Segments by tail, largest first; tensors fused by a dynamic program over that schedule.

        q_i = forward time from the first layer that reads tensor i to the end
        iteration = max(t_b + t_f, max over i of (C_i + q_i)),  C_i = end of tensor i
        F[j] = argmin over i < j of iteration(F[i] + fuse(i+1 .. j) + the tensors behind j, unfused)

    With ideal preemption largest tail first is optimal for a forward pass that computes one layer
    at a time in a fixed order (which makes every q_i a number known beforehand), not for branches
    that compute side by side. A segment costs a start-up time, and a more urgent tensor waits for
    the one under way.

    Args:
        trace: sizes (bytes), times (s) and forward order (`consumers`).
        link: gives T(M) of a segment.
        options: sizes in KiB, window in tensors.

    Raises:
        UsageError: a bad option, segments that cut into more than a million messages, or a bad DAG
            in the trace.

    Example:
        >>> from testbed.scheduling.protocol import make_plan
        >>> trace = Trace.from_backward([2, 2, 3, 3, 5], [3, 4, 1, 1, 1], [1, 1, 1, 2, 2])
        >>> link = Link(backend="gloo", num_workers=4, latency_s=4, seconds_per_byte=1)
        >>> plan = make_plan("pace:segment_kib=0,oracle=ideal", trace, link)
        >>> [(m.priority, [part.tensor for part in m.parts]) for m in plan.messages]
        [(4, [4]), (2, [3, 2]), (0, [1, 0])]
        >>> plan.reason.rpartition("; ")[2]
        'iteration 28 s, 33 s unfused'

    Reference:
        Bao, Peng, Chen and Wu, 2020, INFOCOM (PACE); Baker, Lawler, Lenstra and Rinnooy Kan, 1983,
        Operations Research 31(2) (optimality). Departs: a reconstruction from the abstract, as the
        text of PACE was not at hand; size and cost of segments, order and window of the program,
        and the credit are ours.
    """
    if options.segment_bytes is not None:
        limits = [elements_in(trace, i, options.segment_bytes) for i in range(len(trace.tensors))]
        require_few_messages(trace, limits, "pace: segment_kib")
    return with_processor_time(lambda seen: _planned(trace, seen, options), trace, link)


def _planned(trace: Trace, link: Link, options: PaceOptions) -> Plan:
    tensors = released(trace, link, options.segment_bytes)
    ideal = options.oracle == "ideal"
    singles = list(range(1, len(tensors) + 1))
    stops = fuse(tensors, options.window, ideal).stops if options.window > 1 else singles
    unfused_s, fused_s = (
        finish_s(jobs_of(tensors, s), tensors.compute_s, ideal) for s in (singles, stops)
    )
    messages = _messages(trace, tensors, stops)
    reason = (
        f"largest tail first; {describe_order(trace)}; {len(tensors)} tensors in {len(stops)} "
        f"groups (window {options.window}, {options.oracle} oracle), {len(messages)} messages"
        + (f" of up to {format_bytes(tensors.segment_bytes)}" if tensors.segment_bytes else "")
        + f"; iteration {format_seconds(fused_s)}, {format_seconds(unfused_s)} unfused"
    )
    credit_bytes = max(1, int(options.credit_kib * 1024)) if options.credit_kib else None
    return priority_plan("pace", trace, messages, credit_bytes=credit_bytes, reason=reason)


def released(trace: Trace, link: Link, segment_bytes: int | None) -> Tensors:
    """The trace's tensors in backward order, as the oracle sees them."""
    return Tensors(
        release_s=trace.ready_s()[::-1],
        tail_s=tails_s(trace)[::-1],
        num_bytes=[t.num_bytes for t in reversed(trace.tensors)],
        dtypes=[t.dtype for t in reversed(trace.tensors)],
        link=link,
        segment_bytes=segment_bytes,
        compute_s=trace.backward_s + trace.forward_s,
    )


def _messages(trace: Trace, tensors: Tensors, stops: list[int]) -> tuple[Message, ...]:
    ranks = {tail: rank for rank, tail in enumerate(sorted(set(tensors.tail_s), reverse=True))}
    last = len(tensors) - 1
    messages: list[Message] = []
    for start, stop in pairwise([0, *stops]):
        priority = min(ranks[tensors.tail_s[position]] for position in range(start, stop))
        members = [last - position for position in range(start, stop)]
        if len(members) == 1 and tensors.segment_bytes is not None:
            limit = elements_in(trace, members[0], tensors.segment_bytes)
            slices = slices_of(trace, members[0], limit)
            messages += [Message(parts=(part,), priority=priority) for part in slices]
        else:
            parts = tuple(TensorSlice(i, 0, trace.tensors[i].num_elements) for i in members)
            messages.append(Message(parts=parts, priority=priority))
    return tuple(messages)


PACE = Part(
    name="pace",
    summary="preemptive, largest tail first, with fusion (segment_kib, window, credit_kib, oracle)",
    origin=RECONSTRUCTION,
    build=plan_pace,
    options=PaceOptions,
    facts=lambda options: SchedulerFacts(
        crosses_iteration=True,
        tried=("segment_kib=1024", "", "segment_kib=16384"),
        tried_of_many=("",),
    ),
    # Ours, as the paper's text was not at hand: up to eight times smaller and larger segments.
    knobs=lambda options: {"segment_kib": Range(512, 32768), "window": Grid((1, 4, 16, 64))},
)
