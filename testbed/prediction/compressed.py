"""Timelines of plans whose messages are compressed."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import msgspec

from testbed.base.dtypes import ELEMENT_BYTES
from testbed.base.errors import UsageError
from testbed.base.link import Link
from testbed.base.plan import Plan
from testbed.base.trace import Trace
from testbed.prediction.algorithms import Algorithm, num_mergers, round_phases_s, wire_bytes
from testbed.prediction.codec import CodecCost, RoundCost
from testbed.prediction.compressed_wire import MessageCost, Span, Wire, sent_spans
from testbed.prediction.cross_iteration import forward_end_s
from testbed.prediction.host import Host
from testbed.prediction.timeline import check_belongs, message_ready_s
from testbed.statistics.summary import covered_s


class CompressedTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """The predicted times and bytes of one iteration under a compressor, of one rank.

    Attributes:
        iteration_s: time of one iteration in the steady state.
        exposed_s: end of the last decoding minus end of backward; None for plans that cross the
            iteration boundary.
        encode_s: sum over messages.
        communication_s: while any message is under way; several at once count once.
        decode_s: sum over messages.
        sent_bytes: handed over, all messages.
        dense_bytes: of the gradients.
        ends_s: when each message's mean is there, in the plan's order.
    """

    iteration_s: float
    exposed_s: float | None
    encode_s: float
    communication_s: float
    decode_s: float
    sent_bytes: float
    dense_bytes: int
    ends_s: tuple[float, ...]


def message_cost(
    codec: CodecCost,
    num_elements: int,
    link: Link,
    algorithm: Algorithm,
    *,
    element_bytes: int = 4,
    ratio: float | None = None,
) -> MessageCost:
    """What one message takes under a compressor.

        encode + sum over rounds of (start-ups + transfer, `round_phases_s`)
               + merging at a server + work between rounds + decode

    Args:
        codec: measured with elements of 4 bytes, for as many workers as the link has.
        num_elements: of the message.
        link: measured with dense sums.
        algorithm: that its backend runs.
        element_bytes: of the gradients; payloads are scaled with it.
        ratio: the message's own, instead of the codec's: payloads grow in proportion, up to the
            dense ones; seconds stay, for a selection looks at all elements.

    Raises:
        UsageError: measured for another number of workers; a ratio for a compressor without one.

    Example:
        >>> from testbed.prediction.algorithms import Ring
        >>> from testbed.prediction.codec import CodecSample
        >>> link = Link(backend="gloo", num_workers=2, latency_s=1e-3, seconds_per_byte=1e-9)
        >>> sample = CodecSample(num_elements=1000, compute_s=(2e-3, 1e-3),
        ...                      rounds=(RoundCost(form="gather", num_bytes=80),))
        >>> codec = CodecCost(compressor="topk", num_workers=2, samples=(sample,))
        >>> cost = message_cost(codec, 1_000_000, link, Ring())
        >>> f"{cost.encode_s:g} {cost.communication_s:g} {cost.decode_s:g} {cost.sent_bytes:g}"
        '2 0.00108 1 80000'
    """
    if codec.num_workers != link.num_workers and link.num_workers > 1:
        raise UsageError(
            f"the cost of {codec.compressor!r} was measured for {codec.num_workers} workers, the "
            f"link has {link.num_workers}; measure it for {link.num_workers}"
        )
    sample = codec.at(num_elements)
    factor, dense_bytes = element_bytes / 4, float(num_elements * element_bytes)
    if ratio is not None:
        factor *= ratio / _own_ratio(codec)
    rounds = [_resized(r, factor, dense_bytes, ratio is not None) for r in sample.rounds]
    phases = [round_phases_s(r, link, algorithm, dense_bytes) for r in rounds]
    n = link.num_workers
    return MessageCost(
        encode_s=sample.compute_s[0],
        communication_s=sum(a + b for a, b in phases)
        + sum(r.merge_s / num_mergers(r, n, algorithm, dense_bytes) for r in rounds)
        + sum(sample.compute_s[1:-1]),
        transfer_s=sum(b for _, b in phases),
        decode_s=sample.compute_s[-1],
        sent_bytes=sum(r.num_bytes for r in rounds),
        wire_bytes=sum(wire_bytes(r, n, algorithm, dense_bytes) for r in rounds),
    )


def _own_ratio(codec: CodecCost) -> float:
    if codec.ratio is None:
        raise UsageError(
            f"the plan gives each message a ratio, but {codec.compressor!r} has none; take one "
            "with a ratio, for example ef+topk"
        )
    return codec.ratio


def _resized(each: RoundCost, factor: float, dense_bytes: float, capped: bool) -> RoundCost:
    most = dense_bytes if capped else float("inf")
    return msgspec.structs.replace(
        each,
        num_bytes=min(each.num_bytes * factor, most),
        merged_bytes=min(each.merged_bytes * factor, most),
    )


def compressed_timeline(
    plan: Plan,
    trace: Trace,
    link: Link,
    algorithm: Algorithm,
    codec: CodecCost,
    *,
    one_core: bool = False,
    launches: bool = False,
) -> CompressedTimeline:
    """The iteration time of a plan whose messages are compressed.

    Three stages beside the backward pass, each for one message at a time: encode (a thread of its
    own), communicate (on each channel), decode (a thread of its own):

        e_k = max(e_{k-1}, c_k) + encode_k;  d_k = max(d_{k-1}, E_k) + decode_k
        E_k = max(E_{k-1}, e_k) + communication_k        (order `fifo`, one channel)

    On several channels start-ups overlap and bytes do not: a transfer begins when the one before it
    has ended.

    With order `priority` the most urgent encoded message is sent next. Iteration:
    t_f + max(t_b, d_K), or of a plan that crosses the iteration boundary the end of a forward pass
    in which each layer waits for its own messages.

    With `one_core` encoding and decoding share one thread, which takes what has been ready longest:
    two of them get no further where ranks have no two cores each. What messages cost the computing
    thread is charged to compute, see `Host`, `launches` too.

    Assumed: encoding takes nothing from backward (it has a core or stream of its own); with order
    `priority` messages on several channels do not slow each other; halves (`dear`) travel whole;
    ticks of a background loop and credits are not modelled.

    Raises:
        UsageError: see `message_cost`; a plan of another model.
    """
    check_belongs(plan, trace)
    costs = _costs_of(plan, link, algorithm, codec)
    host = Host.of(link, launches=launches)
    ready_s = host.submitted_s(message_ready_s(plan, trace))
    stages = _on_one_core if one_core else _in_a_pipeline
    spans, ends_s = stages(plan, ready_s, costs)
    whole_s = max(trace.ready_s(), default=0.0)
    backward_s = host.computed_s(trace.backward_s, ready_s)
    last_s = host.landed_s(backward_s, ends_s)
    crosses = plan.crosses_iteration
    return CompressedTimeline(
        iteration_s=(
            forward_end_s(plan, trace, ends_s, host, host.computed_s(whole_s, ready_s))
            if crosses
            else trace.forward_s + last_s
        ),
        exposed_s=None if crosses else last_s - backward_s,
        encode_s=sum(c.encode_s for c in costs),
        communication_s=covered_s(spans),
        decode_s=sum(c.decode_s for c in costs),
        sent_bytes=sum(c.sent_bytes for c in costs),
        dense_bytes=trace.num_bytes,
        ends_s=tuple(ends_s),
    )


def _costs_of(plan: Plan, link: Link, algorithm: Algorithm, codec: CodecCost) -> list[MessageCost]:
    """Of each message; those of equal messages, as slices are, are computed once."""
    known: dict[tuple[int, int, float | None], MessageCost] = {}
    costs = []
    for message in plan.messages:
        size = sum(part.stop - part.start for part in message.parts)
        element_bytes = ELEMENT_BYTES[plan.dtypes[message.parts[0].tensor]] if message.parts else 4
        what = (size, element_bytes, message.ratio)
        if what not in known:
            known[what] = message_cost(
                codec, size, link, algorithm, element_bytes=element_bytes, ratio=message.ratio
            )
        costs.append(known[what])
    return costs


def _in_a_pipeline(
    plan: Plan, ready_s: Sequence[float], costs: Sequence[MessageCost]
) -> tuple[list[Span], list[float]]:
    """When each message is under way, and when its mean is there."""
    encoded_s = _one_after_another(ready_s, [c.encode_s for c in costs])
    spans = sent_spans(plan, encoded_s, costs)
    arrived_s = [end_s for _, end_s in spans]
    return spans, _one_after_another(arrived_s, [c.decode_s for c in costs])


def _on_one_core(
    plan: Plan, ready_s: Sequence[float], costs: Sequence[MessageCost]
) -> tuple[list[Span], list[float]]:
    """As `_in_a_pipeline`, with encoding and decoding on one thread.

    Messages are sent in the order in which they were encoded, whatever the plan's order.
    """
    free_s, ends_s = 0.0, [0.0] * len(costs)
    spans: list[Span] = [(0.0, 0.0)] * len(costs)
    to_encode = [(ready, index) for index, ready in enumerate(ready_s)]
    to_decode: list[tuple[float, int]] = []
    wire = Wire(plan.num_channels)
    heapify(to_encode)
    while to_encode or to_decode:
        encodes = not to_decode or (bool(to_encode) and to_encode[0] <= to_decode[0])
        ready, index = heappop(to_encode if encodes else to_decode)
        cost = costs[index]
        free_s = max(free_s, ready) + (cost.encode_s if encodes else cost.decode_s)
        if encodes:
            spans[index] = wire.send(plan.messages[index].channel, free_s, cost)
            heappush(to_decode, (spans[index][1], index))
        else:
            ends_s[index] = free_s
    return spans, ends_s


def _one_after_another(ready_s: Sequence[float], durations_s: Sequence[float]) -> list[float]:
    """Ends on one thread, in the order in which they become ready; equal ones in their own."""
    ends_s, free_s = [0.0] * len(ready_s), 0.0
    for index in sorted(range(len(ready_s)), key=ready_s.__getitem__):
        free_s = max(free_s, ready_s[index]) + durations_s[index]
        ends_s[index] = free_s
    return ends_s


_LEAST_PER_BYTE_S = 1e-15  # planners divide by it


def effective_link(
    link: Link,
    algorithm: Algorithm,
    codec: CodecCost,
    trace: Trace,
    *,
    one_core: bool = False,
) -> Link:
    """A link on which a dense message takes what a compressed one takes here.

        a' = encode(1) + communicate(1) + decode(1)
        b' = (busiest(N) - busiest(1)) / bytes of N

    for all N elements of the trace: every message has all three stages ahead of it, but of many
    messages in a pipeline only the busiest stage tells how fast they go. It is encode, communicate
    or decode; with `one_core` encode and decode are one stage.

    Args:
        link: measured with dense sums.
        algorithm: that its backend runs.
        codec: measured for as many workers.
        trace: tells N, and the bytes of its elements.
        one_core: see `compressed_timeline`.

    Raises:
        UsageError: measured for another number of workers.

    Example:
        >>> from testbed.prediction.algorithms import Ring
        >>> from testbed.prediction.codec import CodecSample, RoundCost
        >>> from testbed.base.trace import TraceTensor
        >>> link = Link(backend="gloo", num_workers=2, latency_s=1e-3, seconds_per_byte=1e-9)
        >>> codec = CodecCost(compressor="x", num_workers=2, samples=tuple(
        ...     CodecSample(num_elements=n, compute_s=(1e-3 + n * 1e-8, 0.0),
        ...                 rounds=(RoundCost(form="gather", num_bytes=n / 10),))
        ...     for n in (1, 1_000_000)))
        >>> tensor = TraceTensor(name="a", num_elements=1_000_000, forward_s=0, backward_s=1)
        >>> trace = Trace(name="t", device="", batch_size=1, tensors=(tensor,))
        >>> found = effective_link(link, Ring(), codec, trace)
        >>> f"{found.latency_s:.2g} {found.seconds_per_byte:.2g}"
        '0.002 2.5e-09'
    """
    if link.num_workers == 1:
        return link
    count = max(1, sum(tensor.num_elements for tensor in trace.tensors))
    width = max(1, round(trace.num_bytes / count))
    least, whole = (
        message_cost(codec, size, link, algorithm, element_bytes=width) for size in (1, count)
    )
    more_s = _busiest_s(whole, one_core) - _busiest_s(least, one_core)
    return msgspec.structs.replace(
        link,
        latency_s=least.encode_s + least.communication_s + least.decode_s,
        seconds_per_byte=max(_LEAST_PER_BYTE_S, more_s / max(1, trace.num_bytes)),
        pieces=None,
    )


def _busiest_s(cost: MessageCost, one_core: bool) -> float:
    computed = (cost.encode_s, cost.decode_s)
    return max(cost.communication_s, sum(computed) if one_core else max(computed))
