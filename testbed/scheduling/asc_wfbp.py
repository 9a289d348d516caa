"""ASC-WFBP: merge while the channel is busy, and send several messages at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from testbed.base.axes import SchedulerFacts
from testbed.base.errors import UsageError
from testbed.base.knobs import Grid
from testbed.base.link import Link, phases_s
from testbed.base.parts import PUBLISHED, Part
from testbed.base.plan import Plan
from testbed.base.trace import Trace
from testbed.prediction.contention import Admitted, first_in_first_out
from testbed.prediction.timeline import Backward
from testbed.scheduling.build import plan_of, streamed
from testbed.scheduling.processor_time import with_processor_time


@dataclass(frozen=True)
class AscWfbpOptions:
    """Options of `asc-wfbp`.

    Attributes:
        channels: messages under way at once, at most.
    """

    channels: int = 2

    def __post_init__(self) -> None:
        if self.channels < 1:
            raise UsageError(f"asc-wfbp: channels is {self.channels}; expected 1 or more")


def asc_stops(backward: Backward, link: Link) -> list[int]:
    """Stops of the paper's groups, in one pass.

    Planned on one channel: a gradient joins the open group iff it is ready before that group could
    start, R_{l-1} < tau_c(l) (strictly); merging then costs no waiting.

    Example:
        >>> link = Link(backend="x", num_workers=2, latency_s=4, seconds_per_byte=1)
        >>> asc_stops(Backward((2, 4, 7, 10, 15), (3, 4, 1, 1, 1)), link)
        [1, 3, 5]
    """
    ready_s = backward.ready_s
    return streamed(backward, link, lambda j, start_s, *_: ready_s[j + 1] < start_s)


def admit(backward: Backward, stops: Sequence[int], link: Link, num_channels: int) -> Admitted:
    """When these groups travel, first in, first out, at most `num_channels` of them at once.

    Args:
        backward: ready times (s) and sizes (bytes), in backward order.
        stops: of the groups.
        link: gives start-up, transfer time and the slow-down of simultaneous messages.
        num_channels: messages under way at once, at most.

    Example:
        >>> link = Link(backend="x", num_workers=2, latency_s=4, seconds_per_byte=1,
        ...             concurrency_slowdown=(1.0, 1.5))
        >>> admit(Backward((2, 4, 7, 10, 15), (3, 4, 1, 1, 1)), [1, 3, 5], link, 2).end_s
        [9.0, 16.0, 21.0]
    """
    phases = [phases_s(link, size) for size in backward.group_sizes(stops)]
    return first_in_first_out(backward.group_ready_s(stops), phases, num_channels, link.slowdown)


def plan_asc_wfbp(trace: Trace, link: Link, options: AscWfbpOptions) -> Plan:
    """The paper's groups, spread over channels as a first-in, first-out admission would.

        for l = L .. 2:  merge l into l-1  iff  R_{l-1} < tau_c(l)           (tau_c on one channel)

    A group holds what got ready while the channel was busy, so merging costs no waiting; a gradient
    that gets ready during a transfer does not wait but travels beside it, on another channel.

    Args:
        trace: sizes (bytes) and backward times (s).
        link: gives T(M), and the slow-down of simultaneous messages for the choice of channels.
        options: number of channels.

    Raises:
        UsageError: `channels` is below 1.

    Example:
        >>> from testbed.scheduling.protocol import make_plan
        >>> trace = Trace.from_backward([2, 2, 3, 3, 5], num_elements=[3, 4, 1, 1, 1])
        >>> link = Link(backend="gloo", num_workers=4, latency_s=4, seconds_per_byte=1)
        >>> plan = make_plan("asc-wfbp", trace, link)
        >>> [(m.channel, [part.tensor for part in m.parts]) for m in plan.messages]
        [(0, [4]), (1, [3, 2]), (0, [1, 0])]

    Reference:
        Shi, Chu and Li, 2021, INFOCOM. Departs: that plans are made with serial times is read from
        the authors' code, not from the paper's text; admission to channels, and the slow-down of
        more than two messages at once, are ours; so is `with_processor_time`. A group of several
        dtypes counts as one message, and travels as one for each.
    """
    backward = Backward.of(trace)

    def make(seen: Link) -> Plan:
        stops = asc_stops(backward, seen)
        return plan_of(
            "asc-wfbp",
            trace,
            stops,
            channels=admit(backward, stops, seen, options.channels).channel,
            num_channels=min(options.channels, len(stops)),
            reason=f"{len(stops)} messages, up to {options.channels} under way at once",
        )

    return with_processor_time(make, trace, link)


ASC_WFBP = Part(
    name="asc-wfbp",
    summary="ASC-WFBP: merge while the channel is busy, several messages at once (channels=2)",
    origin=PUBLISHED,
    build=plan_asc_wfbp,
    options=AscWfbpOptions,
    facts=lambda options: SchedulerFacts(tried=("", "channels=4")),
    knobs=lambda options: {"channels": Grid((2, 4))},
)
