"""A scheduler's plan for compressed messages: the faster of two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from testbed.prediction.algorithms import Algorithm
from testbed.prediction.codec import CodecCost
from testbed.prediction.compressed import CompressedTimeline, compressed_timeline
from testbed.prediction.effective import effective_link
from testbed.prediction.link import Link
from testbed.prediction.trace import Trace
from testbed.scheduling.overlapped import overlapped
from testbed.scheduling.plan import Plan
from testbed.units import format_seconds


@dataclass(frozen=True)
class CompressedExchange:
    """How a job's ranks compress and send.

    Attributes:
        codec: what compressing costs a rank, while all of them compress.
        algorithm: that the backend runs.
        one_core: ranks have no core for each of the threads that encode and decode.
        max_channels: over which fifo messages are spread, see `overlapped`.
    """

    codec: CodecCost
    algorithm: Algorithm
    one_core: bool = False
    max_channels: int = 1

    def timeline(self, plan: Plan, trace: Trace, link: Link) -> CompressedTimeline:
        """The iteration of a plan whose messages stay on the channels that it names."""
        return compressed_timeline(
            plan, trace, link, self.algorithm, self.codec, one_core=self.one_core
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
