"""When each message of a plan travels, if the backward pass and the link are as recorded.

For plans that stay within the backward pass and whose channels are first in, first out. Plans that
reach into the next forward pass, or that let urgent messages overtake, are simulated apart.
"""

from __future__ import annotations

from collections import deque

import msgspec

from testbed.errors import UsageError
from testbed.prediction.backward import serial_s
from testbed.prediction.contention import SharedLink
from testbed.prediction.costs import phases_s
from testbed.prediction.link import Link
from testbed.prediction.ticks import Ticks, ticked_s
from testbed.prediction.trace import ELEMENT_BYTES, Trace
from testbed.scheduling.plan import Message, Plan


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """One message's way, in seconds from the start of backward.

    Attributes:
        tensors: forward indices of the tensors in it; a slice repeats its tensor's index.
        num_bytes: of the message.
        ready_s: when its last gradient was ready.
        start_s: when it started.
        end_s: when it ended.
        channel: on which it travelled.
    """

    tensors: tuple[int, ...]
    num_bytes: int
    ready_s: float
    start_s: float
    end_s: float
    channel: int = 0


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """What one iteration comes to.

    Attributes:
        spans: of all messages, in the plan's order.
        forward_s: time of the forward pass.
        backward_s: end of the backward pass.
        iteration_s: time of one whole iteration in the steady state.
        exposed_s: end of the last message minus end of backward; None for plans that cross the
            iteration boundary.
        lower_bound_s: no schedule is faster whose messages share the link without gain:
            max(forward + backward, total bytes x seconds_per_byte).
    """

    spans: tuple[Span, ...]
    forward_s: float
    backward_s: float
    iteration_s: float
    exposed_s: float | None
    lower_bound_s: float


def timeline(plan: Plan, trace: Trace, link: Link) -> Timeline:
    """The spans of a plan's messages and the iteration time, t_f + max(t_b, E).

    On one channel the recursion s_k = max(E_{k-1}, c_k), E_k = s_k + T(S_k); on several the events
    of `SharedLink`. The channels are those of the plan: a message waits for the one before it on
    its own channel only.

    Raises:
        UsageError: the plan belongs to another model, or crosses the iteration boundary.

    Reference:
        Shi, Chu and Li, 2021, IEEE TPDS 32(8) (recursion); INFOCOM 2021 (simultaneous messages).
    """
    check_belongs(plan, trace)
    if plan.crosses_iteration or plan.halves or plan.order != "fifo":
        raise UsageError(
            f"plan {plan.scheduler!r} crosses the iteration boundary or overtakes; expected a "
            "first-in-first-out plan within the backward pass; use the crossing simulator"
        )
    ready_s = message_ready_s(plan, trace)
    sizes = [message_bytes(plan, m) for m in plan.messages]
    ticks = ticks_of(plan)
    if plan.num_channels > 1 and ticks is None:
        times = concurrent_s(plan, ready_s, sizes, link)
    elif ticks is None:
        times = serial_s(ready_s, sizes, link)
    else:
        times = ticked_s(ready_s, sizes, link, ticks)
    spans = tuple(
        Span(
            tensors=tuple(p.tensor for p in message.parts),
            num_bytes=size,
            ready_s=ready,
            start_s=start,
            end_s=end,
            channel=message.channel,
        )
        for message, size, ready, (start, end) in zip(
            plan.messages, sizes, ready_s, times, strict=True
        )
    )
    return _summed_up(spans, trace, link)


def _summed_up(spans: tuple[Span, ...], trace: Trace, link: Link) -> Timeline:
    backward_s = max(trace.ready_s(), default=0.0)
    end_s = max((s.end_s for s in spans), default=0.0)
    return Timeline(
        spans=spans,
        forward_s=trace.forward_s,
        backward_s=backward_s,
        iteration_s=trace.forward_s + max(backward_s, end_s),
        exposed_s=max(0.0, end_s - backward_s),
        lower_bound_s=lower_bound_s(trace, link),
    )


def lower_bound_s(trace: Trace, link: Link) -> float:
    """max(forward + backward, total bytes x seconds_per_byte); of a piecewise link the smallest.

    Messages that gain from being simultaneous can get below the second term.
    """
    compute_s = trace.forward_s + trace.backward_s
    if link.num_workers == 1:
        return compute_s
    rates = [p.seconds_per_byte for p in link.pieces or ()] or [link.seconds_per_byte]
    return max(compute_s, trace.num_bytes * min(rates))


def message_bytes(plan: Plan, message: Message) -> int:
    """Bytes of one message."""
    return sum((p.stop - p.start) * ELEMENT_BYTES[plan.dtypes[p.tensor]] for p in message.parts)


def message_ready_s(plan: Plan, trace: Trace) -> list[float]:
    """When each message's last gradient is ready; after backward, if the plan says so."""
    ready_s = trace.ready_s()
    if plan.after_backward:
        return [max(ready_s, default=0.0)] * len(plan.messages)
    return [max((ready_s[p.tensor] for p in m.parts), default=0.0) for m in plan.messages]


def concurrent_s(
    plan: Plan, ready_s: list[float], sizes: list[int], link: Link
) -> list[tuple[float, float]]:
    """Start and end of messages on the plan's channels, which share the link."""
    waiting: dict[int, deque[int]] = {c: deque() for c in range(plan.num_channels)}
    for index, message in enumerate(plan.messages):
        waiting[message.channel].append(index)
    shared: SharedLink[int] = SharedLink(link.slowdown)
    start_s, end_s = [0.0] * len(sizes), [0.0] * len(sizes)
    idle = set(waiting)
    while any(waiting.values()) or len(shared):
        for channel in [
            c for c in sorted(idle) if waiting[c] and ready_s[waiting[c][0]] <= shared.now_s
        ]:
            index = waiting[channel].popleft()
            start_s[index] = shared.now_s
            shared.start(index, *phases_s(link, sizes[index]))
            idle.remove(channel)
        heads = [ready_s[waiting[c][0]] for c in idle if waiting[c]]
        for index in shared.advance(min([shared.next_s(), *heads])):
            end_s[index] = shared.now_s
            idle.add(plan.messages[index].channel)
    return list(zip(start_s, end_s, strict=True))


def ticks_of(plan: Plan) -> Ticks | None:
    """The ticks of a plan that a background loop executes."""
    return None if plan.tick_s is None else Ticks(plan.tick_s, plan.tick_blocking)


def check_belongs(plan: Plan, trace: Trace) -> None:
    """A plan can be executed for the model that it was made for only.

    Raises:
        UsageError: names or sizes differ; the message names the first difference.
    """
    if len(plan.names) != len(trace.tensors):
        raise UsageError(
            f"the plan has {len(plan.names)} tensors, trace {trace.name!r} {len(trace.tensors)}; "
            "expected the same model; plan again from this trace"
        )
    sizes = zip(plan.names, plan.num_elements, plan.dtypes, strict=True)
    for index, (planned, tensor) in enumerate(zip(sizes, trace.tensors, strict=True)):
        found = (tensor.name, tensor.num_elements, tensor.dtype)
        if planned != found:
            raise UsageError(
                f"tensor {index} is {planned} in the plan and {found} in trace {trace.name!r}; "
                "expected the same model; plan again from this trace"
            )
