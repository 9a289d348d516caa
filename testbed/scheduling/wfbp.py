"""Wait-free backpropagation: each gradient leaves as soon as it is ready."""

from __future__ import annotations

from testbed.prediction.link import Link
from testbed.prediction.trace import Trace
from testbed.scheduling.grouping import plan_of
from testbed.scheduling.plan import Plan
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
