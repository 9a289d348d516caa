"""P3: small slices of each tensor, sent strictly by the order of the next forward pass."""

from __future__ import annotations

from dataclasses import dataclass

from testbed.base.axes import SchedulerFacts
from testbed.base.dtypes import ELEMENT_BYTES
from testbed.base.knobs import Grid, Range
from testbed.base.link import Link
from testbed.base.parts import PUBLISHED, Part
from testbed.base.plan import Plan
from testbed.base.trace import Trace
from testbed.prediction.algorithms import sums_on_servers
from testbed.scheduling.build import require_few_messages, require_positive, sliced_plan


@dataclass(frozen=True)
class P3Options:
    """Options of `p3`.

    Attributes:
        slice_elements: per slice; 50 000 in the paper, 40 000 in the authors' code.
        under_way: slices that are chosen ahead, which a more urgent one cannot overtake; above 1
            they are counted by the bytes of full ones, so that many small ones may be; None = 2 on
            parameter servers, 1 with all-reduce.
    """

    slice_elements: int = 50_000
    under_way: int | None = None

    def __post_init__(self) -> None:
        under_way = 1 if self.under_way is None else self.under_way
        require_positive("p3", slice_elements=self.slice_elements, under_way=under_way)


def plan_p3(trace: Trace, link: Link, options: P3Options) -> Plan:
    """Slices of `slice_elements`, few at a time; of the ready ones the first that forward needs.

        priority(slice of tensor l) = position of l in the forward pass
        when fewer than `under_way` slices are chosen:  choose the ready one of smallest priority

    Nothing is fused and each slice costs one start-up time, so it suits links with a small one.

    Args:
        trace: gives sizes (elements) and the forward order (`consumers`); times are not used.
        link: its backend's kind decides how many are under way, where that is not given.
        options: elements per slice.

    Raises:
        UsageError: an option that is not above 0, slices that are more than a million messages, or
            a bad DAG in the trace.

    Example:
        >>> from testbed.scheduling.protocol import make_plan
        >>> trace = Trace.from_backward([2, 2, 3, 3, 5], num_elements=[3, 4, 1, 1, 1])
        >>> link = Link(backend="gloo", num_workers=4, latency_s=4, seconds_per_byte=1)
        >>> plan = make_plan("p3:slice_elements=3", trace, link)
        >>> [(m.priority, m.parts[0].start, m.parts[0].stop) for m in plan.messages]
        [(4, 0, 3), (3, 0, 3), (3, 3, 4), (2, 0, 1), (1, 0, 1), (0, 0, 1)]

    Reference:
        Jayarajan et al., 2019, MLSys (P3). A sender of P3 blocks until a slice is pushed, never for
        its answer, which the server sends by itself. Departs: a message here is the push and the
        pull of a slice together, and those of one channel travel one after another, so that a push
        waits for the pull before it; two chosen ahead leave no gap between them, and that is all.
        Over all-reduce, which P3 is not made for, a slice is one exchange; how slices spread over
        servers is decided by the parameter server's placement, not by turns.
    """
    limits = [options.slice_elements] * len(trace.tensors)
    require_few_messages(trace, limits, "p3: slice_elements")
    count = options.under_way or (2 if sums_on_servers(link) else 1)
    widest = max((ELEMENT_BYTES[tensor.dtype] for tensor in trace.tensors), default=1)
    # Another slice is started while fewer bytes are under way than these.
    credit_bytes = None if count == 1 else (count - 1) * options.slice_elements * widest + 1
    reason = f"slices of {options.slice_elements} elements by forward priority, "
    reason += "one at a time" if count == 1 else f"{count} under way"
    return sliced_plan("p3", trace, limits, credit_bytes=credit_bytes, reason=reason)


P3 = Part(
    name="p3",
    summary="slices by forward priority, few at a time (slice_elements, under_way)",
    origin=PUBLISHED,
    build=plan_p3,
    options=P3Options,
    facts=lambda options: SchedulerFacts(needs_profile=False, crosses_iteration=True, tried=("",)),
    knobs=lambda options: {
        "slice_elements": Range(10_000, 1_000_000, whole=True),
        "under_way": Grid((1, 2, 4)),
    },
)
