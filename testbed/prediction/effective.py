"""The link that dense planning should see where a compressor carries the messages."""

from __future__ import annotations

import msgspec

from testbed.prediction.algorithms import Algorithm
from testbed.prediction.codec import CodecCost
from testbed.prediction.compressed import MessageCost, message_cost
from testbed.prediction.link import Link
from testbed.prediction.trace import Trace

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
        >>> from testbed.prediction.trace import TraceTensor
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
