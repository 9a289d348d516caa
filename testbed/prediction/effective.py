"""The link that dense planning should see where a compressor carries the messages."""

from __future__ import annotations

import msgspec

from testbed.prediction.algorithms import Algorithm
from testbed.prediction.codec import CodecCost
from testbed.prediction.compressed import MessageCost, message_cost
from testbed.prediction.link import Link

_LEAST_PER_BYTE_S = 1e-15  # planners divide by it


def effective_link(
    link: Link,
    algorithm: Algorithm,
    codec: CodecCost,
    num_elements: int,
    *,
    one_core: bool = False,
) -> Link:
    """A link on which a dense message takes what a compressed one takes here.

        a' = encode(1) + communicate(1) + decode(1)
        b' = (busiest(N) - busiest(1)) / 4 N

    for N elements of 4 bytes: every message has all three stages ahead of it, but of many messages
    in a pipeline only the busiest stage tells how fast they go. It is encode, communicate or
    decode; with `one_core` encode and decode are one stage.

    Args:
        link: measured with dense sums.
        algorithm: that its backend runs.
        codec: measured for as many workers.
        num_elements: N, of all gradients.
        one_core: see `compressed_timeline`.

    Raises:
        UsageError: measured for another number of workers.

    Example:
        >>> from testbed.prediction.algorithms import Ring
        >>> from testbed.prediction.codec import CodecSample, RoundCost
        >>> link = Link(backend="gloo", num_workers=2, latency_s=1e-3, seconds_per_byte=1e-9)
        >>> codec = CodecCost(compressor="x", num_workers=2, samples=tuple(
        ...     CodecSample(num_elements=n, compute_s=(1e-3 + n * 1e-8, 0.0),
        ...                 rounds=(RoundCost(form="gather", num_bytes=n / 10),))
        ...     for n in (1, 1_000_000)))
        >>> found = effective_link(link, Ring(), codec, 1_000_000)
        >>> f"{found.latency_s:.2g} {found.seconds_per_byte:.2g}"
        '0.002 2.5e-09'
    """
    if link.num_workers == 1:
        return link
    least = message_cost(codec, 1, link, algorithm)
    whole = message_cost(codec, max(2, num_elements), link, algorithm)
    more_s = _busiest_s(whole, one_core) - _busiest_s(least, one_core)
    return msgspec.structs.replace(
        link,
        latency_s=least.encode_s + least.communication_s + least.decode_s,
        seconds_per_byte=max(_LEAST_PER_BYTE_S, more_s / (4 * max(2, num_elements))),
        pieces=None,
    )


def _busiest_s(cost: MessageCost, one_core: bool) -> float:
    computed = (cost.encode_s, cost.decode_s)
    return max(cost.communication_s, sum(computed) if one_core else max(computed))
