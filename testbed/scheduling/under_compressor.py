"""A scheduler's plan for compressed messages: the faster of two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from testbed.base.link import Link
from testbed.base.plan import Plan
from testbed.base.trace import Trace
from testbed.base.units import format_seconds
from testbed.prediction.algorithms import Algorithm
from testbed.prediction.codec import CodecCost
from testbed.prediction.compressed import CompressedTimeline, compressed_timeline, effective_link

# Compressed messages are spread over several channels, so that their start-ups overlap.

Replan = Callable[[Sequence[str]], Plan]


def overlapped(plan: Plan, replan: Replan | None, max_channels: int) -> tuple[Plan, Replan | None]:
    """The plan, and the function that plans again, with messages on up to `max_channels` channels.

    Compressed messages are short: one after another they would wait for each other's start-ups. A
    plan that has channels of its own, or whose order rank 0 decides, stays as it is. A plan made
    anew gets as many channels as the first, for which the backend was opened.
    """
    count = max(1, min(max_channels, len(plan.messages)))
    again = None if replan is None else lambda names: by_turns(replan(names), count)
    return by_turns(plan, count), again


def by_turns(plan: Plan, num_channels: int) -> Plan:
    """The plan with message k on channel k modulo `num_channels`, if it has one fifo channel.

    Example:
        >>> from testbed.base.plan import Message, TensorSlice
        >>> messages = tuple(Message(parts=(TensorSlice(i, 0, 6),)) for i in range(3))
        >>> plan = Plan(scheduler="x", names=("a", "b", "c"), num_elements=(6,) * 3,
        ...             dtypes=("float32",) * 3, messages=messages)
        >>> [message.channel for message in by_turns(plan, 2).messages]
        [0, 1, 0]
    """
    if plan.order != "fifo" or plan.num_channels > 1:
        return plan
    messages = tuple(
        msgspec.structs.replace(message, channel=number % num_channels)
        for number, message in enumerate(plan.messages)
    )
    return msgspec.structs.replace(plan, num_channels=num_channels, messages=messages)


@dataclass(frozen=True)
class CompressedExchange:
    """How a job's ranks compress and send.

    Attributes:
        codec: what compressing costs a rank, while all of them compress.
        algorithm: that the backend runs.
        one_core: ranks have no core for each of the threads that encode and decode.
        max_channels: over which fifo messages are spread, see `overlapped`.
        launches: a device computes by itself, see `prediction.host.Host`.
    """

    codec: CodecCost
    algorithm: Algorithm
    one_core: bool = False
    max_channels: int = 1
    launches: bool = False

    def timeline(self, plan: Plan, trace: Trace, link: Link) -> CompressedTimeline:
        """The iteration of a plan whose messages stay on the channels that it names."""
        return compressed_timeline(
            *(plan, trace, link, self.algorithm, self.codec),
            one_core=self.one_core,
            launches=self.launches,
        )

    def spread(self, plan: Plan) -> Plan:
        """The plan on as many channels as it may have."""
        return overlapped(plan, None, self.max_channels)[0]


def plan_under(
    make: Callable[[Link], Plan], trace: Trace, link: Link, how: CompressedExchange
) -> tuple[Plan, CompressedTimeline]:
    """The faster of the plan for dense messages and one for what compressed ones take.

    Schedulers that reckon with sparse messages themselves (`omgs`, `lags`) get the link as it is.

    Args:
        make: the scheduler, given a link.
        trace: of the model.
        link: as measured.
        how: what compressing costs.

    Returns:
        The plan before it is spread over channels, and the iteration once it is.
    """
    plan = make(link)
    found = how.timeline(how.spread(plan), trace, link)
    if is_for_sparse(plan):
        return plan, found
    seen = effective_link(link, how.algorithm, how.codec, trace, one_core=how.one_core)
    other = make(seen)
    faster = how.timeline(how.spread(other), trace, link)
    if faster.iteration_s >= found.iteration_s:
        return plan, found
    words = (
        f"planned for {how.codec.compressor}: {format_seconds(seen.latency_s)} and "
        f"{seen.seconds_per_byte * 1e9:.3g} ns a byte for each message"
    )
    reason = "; ".join(filter(None, (other.reason, words)))
    return msgspec.structs.replace(other, reason=reason), faster


def is_for_sparse(plan: Plan) -> bool:
    """Whether the plan was made for sparse messages: it names their ratios."""
    return any(message.ratio is not None for message in plan.messages)
