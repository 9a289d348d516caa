"""P3: small slices of each tensor, sent strictly by the order of the next forward pass."""

from __future__ import annotations

from dataclasses import dataclass

from testbed.base.axes import SchedulerFacts
from testbed.base.link import Link
from testbed.base.parts import PUBLISHED, Part
from testbed.base.plan import Plan
from testbed.base.trace import Trace
from testbed.scheduling.build import require_few_messages, require_positive, sliced_plan


@dataclass(frozen=True)
class P3Options:
    """Options of `p3`.

    Attributes:
        slice_elements: per slice; 50 000 in the paper.
    """

    slice_elements: int = 50_000

    def __post_init__(self) -> None:
        require_positive("p3", slice_elements=self.slice_elements)


def plan_p3(trace: Trace, link: Link, options: P3Options) -> Plan:
    """Slices of `slice_elements` one at a time; of the ready ones the first that forward needs.

        priority(slice of tensor l) = position of l in the forward pass
        when the channel is free: start the ready slice with the smallest priority

    Nothing is fused and each slice costs one start-up time, so it suits links with a small one.

    Args:
        trace: gives sizes (elements) and the forward order (`consumers`); times are not used.
        link: not used.
        options: elements per slice.

    Raises:
        UsageError: `slice_elements` is not above 0 or cuts into more than a million messages, or a
            bad DAG in the trace.

    Example:
        >>> from testbed.scheduling.protocol import make_plan
        >>> trace = Trace.from_backward([2, 2, 3, 3, 5], num_elements=[3, 4, 1, 1, 1])
        >>> link = Link(backend="gloo", num_workers=4, latency_s=4, seconds_per_byte=1)
        >>> plan = make_plan("p3:slice_elements=3", trace, link)
        >>> [(m.priority, m.parts[0].start, m.parts[0].stop) for m in plan.messages]
        [(4, 0, 3), (3, 0, 3), (3, 3, 4), (2, 0, 1), (1, 0, 1), (0, 0, 1)]

    Reference:
        Jayarajan et al., 2019, MLSys (P3). Departs: it works over every backend; how slices spread
        over servers is decided by the parameter server's placement.
    """
    limits = [options.slice_elements] * len(trace.tensors)
    require_few_messages(trace, limits, "p3: slice_elements")
    reason = f"slices of {options.slice_elements} elements by forward priority, one at a time"
    return sliced_plan("p3", trace, limits, credit_bytes=None, reason=reason)


P3 = Part(
    name="p3",
    summary="slices by forward priority, one at a time (slice_elements)",
    origin=PUBLISHED,
    build=plan_p3,
    options=P3Options,
    facts=lambda options: SchedulerFacts(needs_profile=False, crosses_iteration=True, tried=("",)),
)
