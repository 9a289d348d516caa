"""Small traces, and the slow and obvious ways to schedule them that planners are compared with.

Whole numbers of seconds and bytes keep the arithmetic exact, so that ties are ties.
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from itertools import combinations

from testbed.base.link import Link
from testbed.base.trace import Trace
from testbed.prediction.timeline import Backward


def make_link(
    latency_s: float,
    seconds_per_byte: float = 1.0,
    slowdown: tuple[float, ...] | None = None,
    num_workers: int = 4,
) -> Link:
    return Link(
        backend="toy",
        num_workers=num_workers,
        latency_s=latency_s,
        seconds_per_byte=seconds_per_byte,
        concurrency_slowdown=slowdown,
    )


make_trace = partial(Trace.from_backward, name="toy")
TRACE_A = make_trace([2, 2, 3, 3, 5], [3, 4, 1, 1, 1], [1, 1, 1, 2, 2])
SLOWDOWN = tuple(max((k + 1) / 2, k / 1.6) for k in range(1, 9))
LINK_A = make_link(4, 1, SLOWDOWN)


def all_stops(count: int) -> list[list[int]]:
    """Every way to cut `count` neighbours into groups."""
    inner = range(1, count)
    return [[*cuts, count] for size in range(count) for cuts in combinations(inner, size)]


def end_of_serial(trace: Trace, stops: Sequence[int], link: Link) -> Fraction:
    """End of the last group on one channel, in exact arithmetic, group by group."""
    tensors = list(reversed(trace.tensors))
    free_s = Fraction(0)
    start = 0
    for stop in stops:
        ready_s = sum(Fraction(t.backward_s) for t in tensors[:stop])
        size = sum(t.num_elements for t in tensors[start:stop])
        cost_s = Fraction(link.latency_s) + size * Fraction(link.seconds_per_byte) if size else 0
        free_s = max(free_s, ready_s) + cost_s
        start = stop
    return free_s


def concurrent_ends(
    ready_s: Sequence[float], sizes: Sequence[int], link: Link, num_slots: int
) -> list[Fraction]:
    """Ends of messages admitted first in, first out, in exact arithmetic, event by event."""
    startup_s, byte_s = Fraction(link.latency_s), Fraction(link.seconds_per_byte)
    left = {i: [startup_s if size else Fraction(0), size * byte_s] for i, size in enumerate(sizes)}
    ends: dict[int, Fraction] = {}
    queue, active, now_s = list(range(len(sizes))), [], Fraction(0)
    while queue or active:
        while queue and len(active) < num_slots and ready_s[queue[0]] <= now_s:
            active.append(queue.pop(0))
        moving = [i for i in active if left[i][0] == 0]
        factor = Fraction(link.slowdown(len(moving))) if moving else Fraction(1)
        steps = [left[i][1] * factor if left[i][0] == 0 else left[i][0] for i in active]
        if queue and len(active) < num_slots:
            steps.append(Fraction(ready_s[queue[0]]) - now_s)
        step_s = min(steps)
        for i in active:
            if i in moving:
                left[i][1] -= step_s / factor
            else:
                left[i][0] -= step_s
        now_s += step_s
        for i in [i for i in active if left[i] == [0, 0]]:
            ends[i] = now_s
            active.remove(i)
    return [ends[i] for i in range(len(sizes))]


def exposed_by_backlog_s(backward: Backward, stops: Sequence[int], link: Link) -> float:
    """The exposed time by the work that waits at each message's readiness.

        V_0 = 0;  V_k = max(0, V_{k-1} + T(S_k) - (c_{k+1} - c_k));  exposed = V_{K-1} + T(S_K)

    The same number as E - t_b of the recursion, told as a queue; the twin of `scaling`.
    """
    if not stops:
        return 0.0
    ready_s, sizes = backward.group_ready_s(stops), backward.group_sizes(stops)
    waiting_s = 0.0
    for k in range(len(stops) - 1):
        arriving_s = waiting_s + link.time_s(sizes[k])
        waiting_s = max(0.0, arriving_s - (ready_s[k + 1] - ready_s[k]))
    return waiting_s + link.time_s(sizes[-1])
