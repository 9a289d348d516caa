"""Plans that reckon with what messages cost the computing thread, see `prediction.host`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
import numpy as np
from numpy.typing import NDArray

from testbed.base.link import Link, times_s
from testbed.base.plan import Plan
from testbed.base.trace import Trace
from testbed.base.units import format_seconds
from testbed.prediction.cross_iteration import predict
from testbed.prediction.extrapolate import each_piece
from testbed.prediction.host import Host
from testbed.prediction.timeline import Backward, serial_s

Make = Callable[[Link], Plan]


def with_processor_time(
    make: Make, trace: Trace, link: Link, others: Callable[[Plan], Iterable[Plan]] | None = None
) -> Plan:
    """A planner's plan, or a faster one that it makes with processor time in the start-up.

    A rule knows one start-up time for a message, a. What the thread needs to submit it and to take
    its result, o and o', delays compute instead: a message costs between a and a + o + o'. So plans
    are made for a, a + o and a + o + o', and the simulator, which charges both, decides. The rule's
    own plan stays unless another is faster where the thread computes and no slower where a device
    does (`Host.launches`), so that none is ever slower than without o.

    Args:
        make: the planner, given a link.
        trace: of the model.
        link: as measured; without o the plan is `make`'s.
        others: more candidates, given the rule's own plan.

    Reference:
        None published: the papers' rules know a and b.
    """
    plan = make(link)
    spent_s = (link.submit_s, link.submit_s + link.landing_s)
    if link.num_workers == 1 or not spent_s[1]:
        return plan

    def iterations_s(candidate: Plan) -> tuple[float, float]:
        alone, beside = (predict(candidate, trace, link, launches=b) for b in (False, True))
        return alone.iteration_s, beside.iteration_s

    best_s = iterations_s(plan)
    candidates = [make(_raised(link, more_s)) for more_s in dict.fromkeys(spent_s) if more_s]
    candidates += others(plan) if others else ()
    for candidate in candidates:
        found_s = iterations_s(candidate)
        if found_s[0] < best_s[0] and found_s[1] <= best_s[1]:
            plan, best_s = candidate, found_s
    if plan not in candidates:
        return plan
    words = f"with {format_seconds(spent_s[1])} of the thread for each message"
    return msgspec.structs.replace(plan, reason="; ".join(filter(None, (plan.reason, words))))


def _raised(link: Link, more_s: float) -> Link:
    return each_piece(link, lambda a, b: (a + more_s, b))


def charged_stops(backward: Backward, link: Link, most: int) -> list[int]:
    """Stops of at most so many groups on one channel with the earliest end, o charged to compute.

        E[0, 0] = 0;  E[j, k] = min over i < j of max(E[i, k-1], R_j + k o) + T(Q_j - Q_i)

    R_j + k o: when message k, whose last gradient is number j, has been submitted. Of the best
    groups for each number of messages K those count whose last result is taken first, backward
    having ended at R_L + K o. For gradients of one dtype; O(L^2 K).

    Args:
        backward: ready times and sizes.
        link: with o and o'.
        most: messages; a cost for each never makes more of them worth while.

    Example:
        >>> link = Link(backend="x", num_workers=2, latency_s=0, seconds_per_byte=1, submit_s=3)
        >>> backward = Backward((2, 4, 7, 10, 15), (3, 4, 1, 1, 1))
        >>> charged_stops(backward, link, 5)
        [3, 5]
    """
    count, numbers = len(backward), np.arange(1, most + 1)
    prefix = np.array(backward.prefix_bytes, dtype=float)
    end_s = np.full((count + 1, most + 1), np.inf)
    end_s[0, 0] = 0.0
    chosen = np.zeros((count + 1, most + 1), dtype=int)
    for j in range(1, count + 1):
        submitted_s = backward.ready_s[j - 1] + numbers * link.submit_s
        cost_s = times_s(link, prefix[j] - prefix[:j])
        ends_s = np.maximum(end_s[:j, :-1], submitted_s) + cost_s[:, None]
        chosen[j, 1:] = ends_s.argmin(axis=0)
        end_s[j, 1:] = ends_s.min(axis=0)
    host = Host.of(link)

    def taken_s(stops: list[int]) -> float:
        ready_s = host.submitted_s(backward.group_ready_s(stops))
        spans = serial_s(ready_s, backward.group_sizes(stops), link)
        computed_s = host.computed_s(backward.ready_s[-1], ready_s)
        return host.landed_s(computed_s, (end for _, end in spans))

    return min((_backtrack(chosen, k) for k in range(1, min(most, count) + 1)), key=taken_s)


def _backtrack(chosen: NDArray[np.int64], num_messages: int) -> list[int]:
    stops, position = [], len(chosen) - 1
    for number in range(num_messages, 0, -1):
        stops.append(position)
        position = int(chosen[position, number])
    return stops[::-1]
