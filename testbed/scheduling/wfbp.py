"""Wait-free backpropagation: each gradient leaves as soon as it is ready."""

from __future__ import annotations

from testbed.base.link import Link
from testbed.base.plan import Plan
from testbed.base.trace import Trace
from testbed.scheduling.build import plan_of
from testbed.scheduling.protocol import NoOptions, SchedulerKind


def plan_wfbp(trace: Trace, link: Link, options: NoOptions) -> Plan:
    """One message per gradient, in backward order.

    Hides what it can, but pays the start-up time L times: good where a is small.

    Reference:
        Zhang et al., 2017, USENIX ATC (Poseidon).
    """
    stops = range(1, len(trace.tensors) + 1)
    return plan_of("wfbp", trace, stops, reason="one message per gradient, as soon as it is ready")


WFBP = SchedulerKind(
    name="wfbp",
    summary="wait-free backpropagation: one message per gradient as it gets ready",
    options=NoOptions,
    plan=plan_wfbp,
    needs_profile=lambda options: False,
)


# No overlap: one message with everything, after the backward pass.


def plan_sequential(trace: Trace, link: Link, options: NoOptions) -> Plan:
    """One message after backward, E = t_b + a + b sum(M): the baseline of all others.

    Reference:
        You, Buluc and Demmel, 2017, SC (Sync EASGD packs all layers into one message).
    """
    stops = [len(trace.tensors)] if trace.tensors else []
    reason = "everything in one message after backward; nothing overlaps"
    return plan_of("sequential", trace, stops, after_backward=True, reason=reason)


SEQUENTIAL = SchedulerKind(
    name="sequential",
    summary="no overlap: one message after the backward pass (full merge)",
    options=NoOptions,
    plan=plan_sequential,
    needs_profile=lambda options: False,
)
