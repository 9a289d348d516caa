"""When each message of a plan travels, if the backward pass and the link are as recorded.

For plans that stay within the backward pass and whose channels are first in, first out. Plans that
cross the iteration or send by priority are simulated in `cross_iteration`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil

import msgspec

from testbed.base.dtypes import ELEMENT_BYTES
from testbed.base.errors import UsageError
from testbed.base.link import Link, phases_s
from testbed.base.plan import Message, Plan
from testbed.base.trace import Trace
from testbed.prediction.contention import SharedLink
from testbed.prediction.host import Host


@dataclass(frozen=True)
class Backward:
    """Positions 0 .. L - 1 in backward order: position 0 is the last tensor of the forward order.

    Attributes:
        ready_s: when each gradient is ready, from the start of backward; never decreases.
        num_bytes: of each gradient.
        dtypes: of each gradient; empty = one for all.
    """

    ready_s: tuple[float, ...]
    num_bytes: tuple[int, ...]
    dtypes: tuple[str, ...] = ()

    @classmethod
    def of(cls, trace: Trace) -> Backward:
        """The trace in backward order."""
        return cls(
            tuple(reversed(trace.ready_s())),
            tuple(t.num_bytes for t in reversed(trace.tensors)),
            tuple(t.dtype for t in reversed(trace.tensors)),
        )

    def __len__(self) -> int:
        return len(self.ready_s)

    @property
    def prefix_bytes(self) -> list[int]:
        """Bytes of the first 0, 1, ..., L positions."""
        return list(accumulate(self.num_bytes, initial=0))

    def group_sizes(self, stops: Sequence[int]) -> list[int]:
        """Bytes of the groups that end before these positions."""
        prefix = self.prefix_bytes
        return [prefix[j] - prefix[i] for i, j in zip([0, *stops], stops, strict=False)]

    def group_ready_s(self, stops: Sequence[int]) -> list[float]:
        """When the last member of each group is ready."""
        return [self.ready_s[stop - 1] for stop in stops]


def serial_s(
    ready_s: Sequence[float], num_bytes: Sequence[float], link: Link
) -> list[tuple[float, float]]:
    """Start and end of messages that travel one after another on one channel.

        s_k = max(E_{k-1}, c_k);  E_k = s_k + T(S_k);  E_0 = 0

    Example:
        >>> link = Link(backend="x", num_workers=2, latency_s=4, seconds_per_byte=1)
        >>> serial_s([4, 15], [7, 3], link)
        [(4, 15), (15, 22)]
    """
    spans: list[tuple[float, float]] = []
    free_s = 0.0
    for ready, size in zip(ready_s, num_bytes, strict=True):
        start_s = max(free_s, ready)
        free_s = start_s + link.time_s(size)
        spans.append((start_s, free_s))
    return spans


def serial_end_s(backward: Backward, stops: Sequence[int], link: Link) -> float:
    """End of the last of these groups on one channel, from the start of backward."""
    spans = serial_s(backward.group_ready_s(stops), backward.group_sizes(stops), link)
    return spans[-1][1] if spans else 0.0


# Plans whose messages start at the ticks of a background loop, as Horovod's do.


@dataclass(frozen=True)
class Ticks:
    """When a background loop looks for ready gradients; the first tick is the start of backward.

    Periods from options and files are checked with `is_period` where they are read.

    Attributes:
        period_s: time between ticks; 0 = whenever the loop is free.
        blocking: the loop itself carries the messages: no tick before they have ended.
    """

    period_s: float
    blocking: bool

    def at_or_after(self, base_s: float, moment_s: float) -> float:
        """The first tick of the grid that starts at `base_s` and is not before the moment."""
        if moment_s <= base_s or self.period_s == 0:
            return max(base_s, moment_s)
        steps = ceil((moment_s - base_s) / self.period_s)
        # The quotient is rounded: the neighbours decide, so that no tick is early or missed.
        while base_s + steps * self.period_s < moment_s:
            steps += 1
        while base_s + (steps - 1) * self.period_s >= moment_s:
            steps -= 1
        return base_s + steps * self.period_s


def ticked_s(
    ready_s: Sequence[float], num_bytes: Sequence[float], link: Link, ticks: Ticks
) -> list[tuple[float, float]]:
    """Start and end of messages on one channel that are taken up at ticks only.

    At a tick all ready messages are queued: s_k = max(E_{k-1}, tick). A blocking loop ticks next
    at max(tick + period, end of the last message).

    Example:
        >>> link = Link(backend="x", num_workers=2, latency_s=4, seconds_per_byte=1)
        >>> ticked_s([4, 15], [7, 3], link, Ticks(5, True))
        [(5.0, 16.0), (16.0, 23.0)]
    """
    spans: list[tuple[float, float]] = []
    tick_s = next_s = free_s = 0.0
    for ready, size in zip(ready_s, num_bytes, strict=True):
        if ready > tick_s:
            tick_s = ticks.at_or_after(next_s if ticks.blocking else 0.0, ready)
        start_s = max(free_s, tick_s)
        free_s = start_s + link.time_s(size)
        next_s = max(tick_s + ticks.period_s, free_s)
        spans.append((start_s, free_s))
    return spans


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """When one message was sent, in seconds from the start of backward.

    Attributes:
        tensors: forward indices of the tensors in it; a slice repeats its tensor's index.
        num_bytes: of the message.
        ready_s: when its last gradient was ready and it had been submitted.
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
    """The predicted times of one iteration.

    Attributes:
        spans: of all messages, in the plan's order.
        forward_s: time of the forward pass.
        backward_s: end of the backward pass, with what submitting messages added to it.
        iteration_s: time of one whole iteration in the steady state.
        exposed_s: when the last result was taken minus end of backward; None for plans that cross
            the iteration boundary.
        lower_bound_s: no schedule is faster whose messages share the link without gain:
            max(forward + backward, total bytes x seconds_per_byte).
    """

    spans: tuple[Span, ...]
    forward_s: float
    backward_s: float
    iteration_s: float
    exposed_s: float | None
    lower_bound_s: float


def timeline(plan: Plan, trace: Trace, link: Link, *, launches: bool = False) -> Timeline:
    """The spans of a plan's messages and the iteration time, t_f + max(t_b, E).

    On one channel the recursion s_k = max(E_{k-1}, c_k), E_k = s_k + T(S_k); on several the events
    of `SharedLink`. The channels are those of the plan: a message waits for the one before it on
    its own channel only. What messages cost the computing thread is charged to compute (`Host`):
    backward ends K o later, and each result is taken in o'.

    Args:
        plan: of the same model as the trace.
        trace: without messages.
        link: that they travel on.
        launches: see `Host`.

    Raises:
        UsageError: the plan belongs to another model, or crosses the iteration boundary.

    Reference:
        Shi, Chu and Li, 2021, IEEE TPDS 32(8) (recursion); INFOCOM 2021 (simultaneous messages).
    """
    check_belongs(plan, trace)
    if plan.crosses_iteration or plan.halves or plan.order != "fifo":
        raise UsageError(
            f"plan {plan.scheduler!r} crosses the iteration boundary or overtakes; expected a "
            "first-in-first-out plan within the backward pass; use `predict`"
        )
    host = Host.of(link, launches=launches)
    ready_s = host.submitted_s(message_ready_s(plan, trace))
    sizes = [message_bytes(plan, m) for m in plan.messages]
    ticks = ticks_of(plan)
    if plan.num_channels > 1 and ticks is None:
        times = concurrent_s(plan, ready_s, sizes, link)
    elif ticks is None:
        times = serial_s(ready_s, sizes, link)
    else:
        times = ticked_s(ready_s, sizes, link, ticks)
    spans = tuple(
        span_of(plan, index, size, ready, *moments)
        for index, (size, ready, moments) in enumerate(zip(sizes, ready_s, times, strict=True))
    )
    return _summed_up(spans, trace, link, host)


def span_of(
    plan: Plan, index: int, num_bytes: int, ready_s: float, start_s: float, end_s: float
) -> Span:
    """When this message of the plan, or a half of it, was ready, started and ended."""
    message = plan.messages[index]
    return Span(
        tensors=tuple(p.tensor for p in message.parts),
        num_bytes=num_bytes,
        ready_s=ready_s,
        start_s=start_s,
        end_s=end_s,
        channel=message.channel,
    )


def _summed_up(spans: tuple[Span, ...], trace: Trace, link: Link, host: Host) -> Timeline:
    alone_s = max(trace.ready_s(), default=0.0)
    backward_s = host.computed_s(alone_s, [s.ready_s for s in spans])
    end_s = host.landed_s(backward_s, (s.end_s for s in spans))
    return Timeline(
        spans=spans,
        forward_s=trace.forward_s,
        backward_s=backward_s,
        iteration_s=trace.forward_s + end_s,
        exposed_s=end_s - backward_s,
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
    """Refuse a plan that was made for another model.

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
