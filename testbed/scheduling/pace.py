"""PACE: the tensor that the next forward pass waits for longest goes first, small ones fused."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from testbed.errors import UsageError
from testbed.prediction.dag import describe_order, tails_s
from testbed.prediction.link import Link
from testbed.prediction.trace import Trace
from testbed.scheduling.pace_fusion import fuse, jobs_of
from testbed.scheduling.pace_oracle import Tensors, finish_s
from testbed.scheduling.plan import Message, Part, Plan
from testbed.scheduling.protocol import SchedulerKind
from testbed.scheduling.slices import (
    elements_in,
    priority_plan,
    require_few_messages,
    require_positive,
    slices_of,
)
from testbed.units import format_bytes, format_seconds

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
            if not 0 <= value < float("inf"):
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

    With ideal preemption largest tail first is optimal for a forward pass that computes one layer
    at a time in a fixed order (which makes every q_i a number known beforehand), not for branches
    that compute side by side. A segment costs a start-up time, and a more urgent tensor waits for
    the one under way.

    Raises:
        UsageError: a bad option, segments that cut into more than a million messages, or a bad DAG
            in the trace.

    Reference:
        Bao, Peng, Chen and Wu, 2020, INFOCOM (PACE); Baker, Lawler, Lenstra and Rinnooy Kan, 1983,
        Operations Research 31(2) (optimality). The text of PACE was not available; free: size and
        cost of segments, order and window of the program, the credit.
    """
    if options.segment_bytes is not None:
        limits = [elements_in(trace, i, options.segment_bytes) for i in range(len(trace.tensors))]
        require_few_messages(trace, limits, "pace: segment_kib")
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
        + f"; iteration {_words(fused_s)}, {_words(unfused_s)} unfused"
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
            parts = tuple(Part(i, 0, trace.tensors[i].num_elements) for i in members)
            messages.append(Message(parts=parts, priority=priority))
    return tuple(messages)


def _words(seconds: float) -> str:
    return format_seconds(seconds) if seconds > 0 else "0 s"


PACE = SchedulerKind(
    name="pace",
    summary="preemptive, largest tail first, with fusion (segment_kib, window, credit_kib, oracle)",
    options=PaceOptions,
    plan=plan_pace,
    crosses_iteration=True,
)
