"""A scheduler: each message takes what became ready while the one before it was on its way."""

from __future__ import annotations

from dataclasses import dataclass

from testbed.base.axes import SchedulerFacts
from testbed.base.errors import UsageError
from testbed.base.link import Link
from testbed.base.parts import Part
from testbed.base.plan import Plan
from testbed.base.trace import Trace
from testbed.prediction.timeline import Backward
from testbed.scheduling.build import plan_of, streamed


@dataclass(frozen=True)
class WhenFreeOptions:
    """Options of `when-free`.

    Attributes:
        min_kib: a message also waits until it has so many KiB.
    """

    min_kib: int = 0

    def __post_init__(self) -> None:
        if self.min_kib < 0:
            raise UsageError(f"when-free: min_kib is {self.min_kib}; expected 0 or more KiB")


def plan_when_free(trace: Trace, link: Link, options: WhenFreeOptions) -> Plan:
    """Gradient l joins the open message of M bytes iff R_l <= E or M < min_kib KiB.

    R_l: when it is ready; E: when the message before ends (s): waiting until then costs nothing.

    Example:
        >>> trace = Trace.from_backward([2, 2, 3, 3, 5], num_elements=[3, 4, 1, 1, 1])
        >>> link = Link(backend="gloo", num_workers=2, latency_s=4, seconds_per_byte=1)
        >>> [len(m.parts) for m in plan_when_free(trace, link, WhenFreeOptions()).messages]
        [1, 2, 2]

    Reference:
        Nagle, 1984, RFC 896. Departs: the end of a message is predicted, not observed.
    """
    backward, least = Backward.of(trace), 1024 * options.min_kib
    ready_s = backward.ready_s
    stops = streamed(backward, link, lambda j, _, end_s, m: ready_s[j + 1] <= end_s or m < least)
    reason = f"{len(stops)} messages of what became ready while the one before was on its way"
    return plan_of("when-free", trace, stops, reason=reason)


WHEN_FREE = Part(
    name="when-free",
    summary="what became ready while the message before was on its way (min_kib=0)",
    build=plan_when_free,
    options=WhenFreeOptions,
    facts=lambda options: SchedulerFacts(),
)
