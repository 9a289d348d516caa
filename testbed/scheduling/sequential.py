"""No overlap: one message with everything, after the backward pass."""

from __future__ import annotations

from testbed.prediction.link import Link
from testbed.prediction.trace import Trace
from testbed.scheduling.grouping import plan_of
from testbed.scheduling.plan import Plan
from testbed.scheduling.protocol import NoOptions, SchedulerKind


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
