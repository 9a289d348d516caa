"""A scheduler: groups of 1, 2, 4, ... gradients, so that the first ones leave soon."""

from __future__ import annotations

from dataclasses import dataclass

from testbed.base.axes import SchedulerFacts
from testbed.base.errors import UsageError
from testbed.base.link import Link
from testbed.base.parts import OURS, Part
from testbed.base.plan import Plan
from testbed.base.trace import Trace
from testbed.scheduling.build import plan_of


@dataclass(frozen=True)
class DoublingOptions:
    """Options of `toy-doubling`.

    Attributes:
        first: gradients in the first group.
    """

    first: int = 1

    def __post_init__(self) -> None:
        if self.first < 1:
            raise UsageError(f"toy-doubling: first is {self.first}; expected 1 or more")


def plan_doubling(trace: Trace, link: Link, options: DoublingOptions) -> Plan:
    """Group k holds first * 2^k gradients in backward order: log2(L / first) start-ups, not L.

    Example:
        >>> trace = Trace.from_backward([1, 1, 1, 1, 1], num_elements=[9, 8, 7, 6, 5])
        >>> link = Link(backend="gloo", num_workers=2, latency_s=1e-4, seconds_per_byte=1e-9)
        >>> plan = plan_doubling(trace, link, DoublingOptions())
        >>> [[(part.tensor, part.stop) for part in message.parts] for message in plan.messages]
        [[(4, 9)], [(3, 8), (2, 7)], [(1, 6), (0, 5)]]
    """
    stops, size = [0], options.first
    while stops[-1] < len(trace.tensors):
        stops.append(min(len(trace.tensors), stops[-1] + size))
        size *= 2
    reason = f"groups of {options.first}, {2 * options.first}, ... gradients"
    return plan_of("toy-doubling", trace, stops[1:], reason=reason)


TOY_DOUBLING = Part(
    name="toy-doubling",
    summary="groups of 1, 2, 4, ... gradients (first=1)",
    origin=OURS,
    build=plan_doubling,
    options=DoublingOptions,
    facts=lambda options: SchedulerFacts(needs_profile=False),
)
