"""P3: small slices of each tensor, sent strictly by forward priority."""

from __future__ import annotations

from dataclasses import dataclass

from testbed.base.link import Link
from testbed.base.plan import Plan
from testbed.base.trace import Trace
from testbed.scheduling.build import require_few_messages, require_positive, sliced_plan
from testbed.scheduling.protocol import SchedulerKind


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
    """Slices of `slice_elements`, one at a time, the most urgent ready one first.

    Nothing is fused and each slice costs one start-up time, so it suits links with a small one.

    Raises:
        UsageError: `slice_elements` is not above 0 or cuts into more than a million messages, or a
            bad DAG in the trace.

    Reference:
        Jayarajan et al., 2019, MLSys (P3). Departs: it works over every backend; how slices spread
        over servers is the parameter server's own choice.
    """
    limits = [options.slice_elements] * len(trace.tensors)
    require_few_messages(trace, limits, "p3: slice_elements")
    reason = f"slices of {options.slice_elements} elements by forward priority, one at a time"
    return sliced_plan("p3", trace, limits, credit_bytes=None, reason=reason)


P3 = SchedulerKind(
    name="p3",
    summary="slices by forward priority, one at a time (slice_elements)",
    options=P3Options,
    plan=plan_p3,
    needs_profile=lambda options: False,
    crosses_iteration=True,
)
