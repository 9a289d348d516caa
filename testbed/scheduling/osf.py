"""OSF: adaptive tensor fusion, driven by a model of the scaling factor (a reconstruction)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Literal

import numpy as np

from testbed.base.axes import SchedulerFacts
from testbed.base.knobs import Grid
from testbed.base.link import Link, merge_gain_s, times_s
from testbed.base.parts import RECONSTRUCTION, Part
from testbed.base.plan import Plan
from testbed.base.trace import Trace
from testbed.prediction.factors import scaling
from testbed.prediction.timeline import Backward
from testbed.scheduling.build import add_then_close, plan_of, streamed
from testbed.scheduling.optimal import optimal_stops
from testbed.scheduling.processor_time import with_processor_time

Rule = Literal["global", "message", "schedule", "exact"]


@dataclass(frozen=True)
class OsfOptions:
    """Options of `osf`.

    Attributes:
        rule: `global`: the one buffer size with the best predicted scaling factor; `message`:
            each message decides whether to wait for the next gradient; `schedule`: the buffer
            grows while messages are hidden and shrinks towards the end of backward; `exact`: the
            best groups there are, as `optimal`.
    """

    rule: Rule = "global"


def global_stops(backward: Backward, link: Link) -> list[int]:
    """Stops of the one buffer size (add, then close) with the earliest predicted end.

    Candidates are the sizes of single gradients and of all prefixes; the smallest of the best
    wins. All candidates are evaluated together, O(L) each.

    Example:
        >>> link = Link(backend="x", num_workers=2, latency_s=4, seconds_per_byte=1)
        >>> global_stops(Backward((2, 4, 7, 10, 15), (3, 4, 1, 1, 1)), link)
        [2, 5]
    """
    sizes = {float(s) for s in (*backward.num_bytes, *backward.prefix_bytes)}
    limits = np.array(sorted(sizes))
    end_s, open_bytes = np.zeros(len(limits)), np.zeros(len(limits))
    last = len(backward) - 1
    for position, (ready, size) in enumerate(
        zip(backward.ready_s, backward.num_bytes, strict=True)
    ):
        open_bytes += size
        close = (open_bytes >= limits) | (position == last)
        ended_s = np.maximum(end_s, ready) + times_s(link, open_bytes)
        end_s = np.where(close, ended_s, end_s)
        open_bytes[close] = 0.0
    return add_then_close(backward.num_bytes, float(limits[end_s.argmin()]))


def message_stops(backward: Backward, link: Link) -> list[int]:
    """Stops of messages that wait for the next gradient while that is free or worth it.

    Free: it is ready before the channel is, R_{j+1} <= E. Worth it: R_{j+1} - max(E, R_j) < a and
    the rest of backward still covers the message with it, t_b - R_j >= T(S + M_{j+1}).
    """
    gain_s = merge_gain_s(link)
    ready_s, sizes = backward.ready_s, backward.num_bytes

    def keep_open(j: int, start_s: float, free_s: float, open_bytes: int) -> bool:
        left_s = ready_s[-1] - ready_s[j]
        gains = ready_s[j + 1] - start_s < gain_s
        covered = left_s >= link.time_s(open_bytes + sizes[j + 1])
        return ready_s[j + 1] <= free_s or (gains and covered)

    return streamed(backward, link, keep_open)


def schedule_stops(backward: Backward, link: Link) -> list[int]:
    """Stops of messages with a buffer that grows while hidden and shrinks towards the end.

    The buffer starts at a / b, where start-up and transfer cost the same, doubles with every
    message that found the channel idle, and is never above what the rest of backward can hide,
    (t_b - R_j - a) / b. While the channel is busy a message stays open: that costs nothing.
    """
    gain_s, ready_s = merge_gain_s(link), backward.ready_s
    limit = _bytes_in(gain_s, link)

    def keep_open(j: int, start_s: float, free_s: float, open_bytes: int) -> bool:
        nonlocal limit
        left_s = ready_s[-1] - ready_s[j] - gain_s
        if ready_s[j + 1] <= free_s or open_bytes < min(limit, _bytes_in(left_s, link)):
            return True
        if ready_s[j] >= free_s:
            limit *= 2
        return False

    return streamed(backward, link, keep_open)


def _bytes_in(seconds: float, link: Link) -> float:
    if seconds <= 0:
        return 0.0
    return seconds / link.seconds_per_byte if link.seconds_per_byte > 0 else inf


RULES: dict[Rule, Callable[[Backward, Link], list[int]]] = {
    "global": global_stops,
    "message": message_stops,
    "schedule": schedule_stops,
    "exact": optimal_stops,
}


def plan_osf(trace: Trace, link: Link, options: OsfOptions) -> Plan:
    """Adaptive fusion by one of four rules; the plan's reason holds terms of the scaling factor.

        SF = (t_f + t_b) / (t_f + max(t_b, E_K)),   E_k = max(E_{k-1}, c_k) + T(S_k)

        global:   one buffer B for all messages, the B with the largest SF
        message:  keep a message open while R_{j+1} <= E, or while R_{j+1} - max(E, R_j) < a and the
                  rest of backward still covers it
        schedule: B starts at a / b, doubles with each message that found the channel idle, and is
                  at most (t_b - R_j - a) / b
        exact:    the groups of `optimal`

    Args:
        trace: sizes (bytes) and times (s).
        link: gives T(M).
        options: the rule.

    Raises:
        UsageError: an unknown rule.

    Example:
        >>> from testbed.scheduling.protocol import make_plan
        >>> trace = Trace.from_backward([2, 2, 3, 3, 5], num_elements=[3, 4, 1, 1, 1])
        >>> link = Link(backend="gloo", num_workers=4, latency_s=4, seconds_per_byte=1)
        >>> plan = make_plan("osf:rule=global", trace, link)
        >>> [[part.tensor for part in message.parts] for message in plan.messages]
        [[4, 3], [2, 1, 0]]

    Reference:
        Liu et al., 2022, WWW (OSF): adaptive fusion driven by a recursive scaling-factor model that
        knows overlap and fusion. Departs: this is a reconstruction from the abstract, as the
        paper's text was not at hand; all four rules are ours. A group of several dtypes counts as
        one message, also in the reason of the plan, and travels as one for each.
    """
    backward = Backward.of(trace)

    def make(seen: Link) -> Plan:
        stops = RULES[options.rule](backward, seen)
        reason = f"rule {options.rule}; {scaling(trace, stops, seen).in_words()}"
        return plan_of("osf", trace, stops, reason=reason)

    return with_processor_time(make, trace, link)


OSF = Part(
    name="osf",
    summary="OSF: fusion driven by a scaling-factor model (rule=global|message|schedule|exact)",
    origin=RECONSTRUCTION,
    build=plan_osf,
    options=OsfOptions,
    facts=lambda options: SchedulerFacts(tried=("",)),
    # Not `exact`: that is another method, `optimal`. The abstract names no setting.
    knobs=lambda options: {"rule": Grid(("global", "message", "schedule"))},
)
