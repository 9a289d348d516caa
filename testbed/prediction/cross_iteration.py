"""Timelines of plans whose messages may still be under way in the next forward pass.

Time 0 is the start of backward, the horizon is the end of the next forward pass. Every message
ends before some layer of that pass starts, so the channel is idle when the next backward starts and
each iteration is the same as the one before: the end of forward *is* the steady-state iteration.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from math import inf

from testbed.base.errors import UsageError
from testbed.base.link import Link
from testbed.base.plan import Plan
from testbed.base.trace import Trace
from testbed.prediction.host import Host
from testbed.prediction.timeline import (
    Span,
    Timeline,
    check_belongs,
    lower_bound_s,
    message_bytes,
    message_ready_s,
    serial_s,
    span_of,
    timeline,
)


def forward_order(trace: Trace) -> list[int]:
    """Indices of the tensors in the order in which one forward pass on one stream reads them.

    The topological order of `Trace.consumers` that departs least from the order of the file; the
    file's own order where that is topological, and on a chain.

    Raises:
        UsageError: a consumer that does not exist, or layers that wait for each other.

    Example:
        >>> from testbed.base.trace import TraceTensor
        >>> tensor = TraceTensor(name="w", num_elements=1, forward_s=1.0, backward_s=1.0)
        >>> trace = Trace(name="t", device="cpu", batch_size=1, tensors=(tensor,) * 3,
        ...               consumers=((2,), (), (1,)))
        >>> forward_order(trace)
        [0, 2, 1]
    """
    count = len(trace.tensors)
    if trace.consumers is None:
        return list(range(count))
    _check(trace, trace.consumers)
    producers = [0] * count
    for readers in trace.consumers:
        for reader in readers:
            producers[reader] += 1
    ready = [i for i in range(count) if producers[i] == 0]
    heapify(ready)
    order: list[int] = []
    while ready:
        index = heappop(ready)
        order.append(index)
        for reader in trace.consumers[index]:
            producers[reader] -= 1
            if producers[reader] == 0:
                heappush(ready, reader)
    if len(order) < count:
        stuck = next(i for i in range(count) if producers[i] > 0)
        raise UsageError(
            f"consumers of trace {trace.name!r} form a cycle through tensor {stuck} "
            f"({trace.tensors[stuck].name!r}); expected a DAG; leave the key out for a chain"
        )
    return order


def tails_s(trace: Trace) -> list[float]:
    """For each tensor the forward time from the layer that reads it first to the end.

        q_i = sum of forward_s over the layers from tensor i's own to the last

    One stream computes one layer at a time, so everything behind a layer waits for it, in its
    branch or not: the DAG decides the order alone. On a chain q_l = sum of forward_s over k >= l.
    Tensors are treated as layers: a layer's bias counts as read after its weight, though the layer
    waits for both, so predictions of plans that cross the iteration are slightly optimistic.

    Returns:
        Seconds, in the order of the trace.

    Raises:
        UsageError: see `forward_order`.
    """
    tails = [0.0] * len(trace.tensors)
    left_s = 0.0
    for index in reversed(forward_order(trace)):
        left_s += trace.tensors[index].forward_s
        tails[index] = left_s
    return tails


def describe_order(trace: Trace) -> str:
    """Where the forward order comes from, in words."""
    if trace.consumers is None:
        return "forward order: a chain (the trace has no consumers)"
    branches = sum(len(set(readers)) > 1 for readers in trace.consumers)
    return f"forward order: the trace's DAG ({branches} tensors with several consumers)"


def _check(trace: Trace, consumers: tuple[tuple[int, ...], ...]) -> None:
    count = len(trace.tensors)
    if len(consumers) != count:
        raise UsageError(
            f"trace {trace.name!r} has {count} tensors and consumers of {len(consumers)}; "
            f"expected one list for each tensor"
        )
    for index, readers in enumerate(consumers):
        for reader in readers:
            if not 0 <= reader < count:
                raise UsageError(
                    f"consumers of tensor {index} ({trace.tensors[index].name!r}) name tensor "
                    f"{reader}; expected indices 0 to {count - 1}"
                )


def predict(plan: Plan, trace: Trace, link: Link, *, launches: bool = False) -> Timeline:
    """The timeline of any plan, by the simulator that its rules need.

    Args:
        plan: of the same model as the trace.
        trace: without messages.
        link: that they travel on.
        launches: a device computes by itself, see `Host`.

    Raises:
        UsageError: the plan belongs to another model, or its rules cannot be simulated together.
    """
    if plan.crosses_iteration or plan.halves or plan.order == "priority":
        return cross_iteration_timeline(plan, trace, link, launches=launches)
    return timeline(plan, trace, link, launches=launches)


def cross_iteration_timeline(
    plan: Plan, trace: Trace, link: Link, *, launches: bool = False
) -> Timeline:
    """The spans of a plan by priority or in halves, and its iteration time.

    Forward layer l starts when the layers before it are done and all messages of its tensor have
    ended: F_l = max(F_{l-1}, C_l) + t_f(l), F_0 = end of backward; iteration = F of the last layer.
    What messages cost the computing thread is charged to compute (`Host`): submitting in backward,
    taking a result before its first layer; of halves each, and spreads are submitted at the end of
    backward, before the first layer.
    A plan in halves has two spans for each message, its fold and its spread, with half of the bytes
    each (an odd byte is counted with the fold). All folds end before the first spread starts; the
    spreads then run back to back in forward order, as the engine submits them. (The paper issues
    each from the hook of the group before, so that it may start later, when forward is slower.)

    Raises:
        UsageError: the plan belongs to another model, or has several channels or halves by
            priority, whose order of execution is not defined.

    Reference:
        Peng et al., 2019, SOSP (credit); Zhang et al., 2023, ICDCS (halves).
    """
    check_belongs(plan, trace)
    _check_rules(plan)
    host = Host.of(link, launches=launches)
    ready_s = host.submitted_s(message_ready_s(plan, trace))
    backward_s = host.computed_s(max(trace.ready_s(), default=0.0), ready_s)
    if plan.halves:
        spans, forward_s = _in_halves(plan, trace, link, ready_s, host, backward_s)
    else:
        spans = _by_rule(plan, link, ready_s)
        forward_s = forward_end_s(plan, trace, [s.end_s for s in spans], host, backward_s)
    end_s = host.landed_s(backward_s, (s.end_s for s in spans))
    if not plan.crosses_iteration:
        forward_s = end_s + trace.forward_s
    return Timeline(
        spans=spans,
        forward_s=trace.forward_s,
        backward_s=backward_s,
        iteration_s=forward_s,
        exposed_s=None if plan.crosses_iteration else end_s - backward_s,
        lower_bound_s=lower_bound_s(trace, link),
    )


def prioritised_s(
    ready_s: Sequence[float],
    priorities: Sequence[int],
    num_bytes: Sequence[int],
    times_s: Sequence[float],
    credit_bytes: int | None,
) -> list[tuple[float, float]]:
    """Start and end of messages on one channel, the most urgent ready one next; O(n log n).

    A message is chosen while the bytes under way are below the credit (None: while nothing is under
    way); what is chosen travels one after another. Equal priorities go by index.

    Example:
        >>> prioritised_s([0, 1, 1], [2, 1, 0], [4, 4, 4], [5.0, 5.0, 5.0], None)
        [(0.0, 5.0), (10.0, 15.0), (5.0, 10.0)]
    """
    arrivals = sorted(range(len(ready_s)), key=ready_s.__getitem__)
    spans: list[tuple[float, float]] = [(0.0, 0.0)] * len(ready_s)
    waiting: list[tuple[int, int]] = []
    under_way: deque[tuple[float, int]] = deque()
    under_way_bytes, free_s, now_s, head = 0, 0.0, 0.0, 0
    while head < len(arrivals) or waiting:
        while head < len(arrivals) and ready_s[arrivals[head]] <= now_s:
            heappush(waiting, (priorities[arrivals[head]], arrivals[head]))
            head += 1
        while under_way and under_way[0][0] <= now_s:
            under_way_bytes -= under_way.popleft()[1]
        while waiting and _may_choose(under_way, under_way_bytes, credit_bytes):
            index = heappop(waiting)[1]
            start_s = max(free_s, now_s)
            free_s = start_s + times_s[index]
            spans[index] = (start_s, free_s)
            under_way.append((free_s, num_bytes[index]))
            under_way_bytes += num_bytes[index]
        release_s = ready_s[arrivals[head]] if head < len(arrivals) else inf
        now_s = min(release_s, under_way[0][0] if waiting else inf)
    return spans


def _may_choose(
    under_way: deque[tuple[float, int]], under_way_bytes: int, credit_bytes: int | None
) -> bool:
    return not under_way if credit_bytes is None else under_way_bytes < credit_bytes


def forward_end_s(
    plan: Plan, trace: Trace, ends_s: Sequence[float], host: Host, backward_s: float
) -> float:
    """End of the next forward pass, if the plan's messages end then: layers wait for their own.

    Args:
        plan: of the same model as the trace.
        trace: without messages.
        ends_s: of each message.
        host: that takes their results.
        backward_s: end of the backward pass.
    """
    now_s = backward_s
    for layer, needed in _needed_first(plan, trace):
        now_s = host.landed_s(now_s, (ends_s[index] for index in needed))
        now_s += trace.tensors[layer].forward_s
    return now_s


def _by_rule(plan: Plan, link: Link, ready_s: Sequence[float]) -> tuple[Span, ...]:
    sizes = [message_bytes(plan, m) for m in plan.messages]
    if plan.order == "fifo":
        times = serial_s(ready_s, sizes, link)
    else:
        cost_s = {size: link.time_s(size) for size in set(sizes)}
        priorities = [m.priority for m in plan.messages]
        durations_s = [cost_s[size] for size in sizes]
        times = prioritised_s(ready_s, priorities, sizes, durations_s, plan.credit_bytes)
    return tuple(
        span_of(plan, index, size, ready_s[index], *moments)
        for index, (size, moments) in enumerate(zip(sizes, times, strict=True))
    )


def _in_halves(
    plan: Plan,
    trace: Trace,
    link: Link,
    ready_s: Sequence[float],
    host: Host,
    backward_s: float,
) -> tuple[tuple[Span, ...], float]:
    """Folds in the plan's order, a barrier, then the spreads back to back in forward order.

    The hook before a message's first layer waits for its spread.
    """
    sizes = [message_bytes(plan, m) for m in plan.messages]
    half_s = [link.time_s(size) / 2 for size in sizes]
    spans: list[Span] = []
    folded_s = 0.0
    for index, ready in enumerate(ready_s):
        start_s = max(folded_s, ready)
        folded_s = start_s + half_s[index]
        spans.append(span_of(plan, index, -(-sizes[index] // 2), ready, start_s, folded_s))
    spread_s = barrier_s = host.landed_s(backward_s, [s.end_s for s in spans])
    now_s = barrier_s + len(sizes) * host.submit_s
    submitted = 0
    for layer, needed in _needed_first(plan, trace):
        for index in needed:
            submitted += 1
            asked_s = barrier_s + submitted * host.submit_s
            start_s = max(spread_s, asked_s)
            spread_s = start_s + half_s[index]
            spans.append(span_of(plan, index, sizes[index] // 2, asked_s, start_s, spread_s))
            now_s = host.landed_s(now_s, [spread_s])
        now_s += trace.tensors[layer].forward_s
    return tuple(spans), now_s


def _needed_first(plan: Plan, trace: Trace) -> Iterable[tuple[int, list[int]]]:
    """For each layer in forward order the messages that no layer before it needed."""
    holding: list[list[int]] = [[] for _ in trace.tensors]
    for index, message in enumerate(plan.messages):
        for part in message.parts:
            holding[part.tensor].append(index)
    seen: set[int] = set()
    for layer in forward_order(trace):
        needed = [i for i in dict.fromkeys(holding[layer]) if i not in seen]
        seen.update(needed)
        yield layer, needed


def _check_rules(plan: Plan) -> None:
    if plan.num_channels > 1:
        raise UsageError(
            f"plan {plan.scheduler!r} crosses the iteration boundary on {plan.num_channels} "
            "channels; expected one channel; plan with channels=1"
        )
    if plan.halves and plan.order != "fifo":
        raise UsageError(
            f"plan {plan.scheduler!r} is in halves and by priority; expected order 'fifo': halves "
            "run backward and forward in the order of the layers"
        )
