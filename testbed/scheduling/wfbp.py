"""WFBP (one message per gradient) and its opposite, `sequential` (one message after backward)."""

from __future__ import annotations

from testbed.base.axes import SchedulerFacts
from testbed.base.link import Link
from testbed.base.parts import PUBLISHED, NoOptions, Part
from testbed.base.plan import Plan
from testbed.base.trace import Trace
from testbed.scheduling.build import plan_of


def plan_wfbp(trace: Trace, link: Link, options: NoOptions) -> Plan:
    """Wait-free backpropagation: one message per gradient, in backward order, as it gets ready.

        tau_c(l) = max(R_l, tau_c(l+1) + T(M_{l+1}))

    R_l (s): gradient l is ready; tau_c(l) (s): its message of M_l bytes starts, and takes T (s).
    Hides most of the transfer behind the backward pass but pays the start-up time L times: good
    where a is small.

    Args:
        trace: gives the number and order of the tensors; times are not used.
        link: not used.
        options: none.

    Raises:
        UsageError: an option is given; there are none.

    Example:
        >>> from testbed.scheduling.protocol import make_plan
        >>> trace = Trace.from_backward([2, 2, 3, 3, 5], num_elements=[3, 4, 1, 1, 1])
        >>> link = Link(backend="gloo", num_workers=4, latency_s=4, seconds_per_byte=1)
        >>> plan = make_plan("wfbp", trace, link)
        >>> [[part.tensor for part in message.parts] for message in plan.messages]
        [[4], [3], [2], [1], [0]]

    Reference:
        Zhang et al., 2017, USENIX ATC (Poseidon). Departs: the choice between server and sufficient
        factors for each layer is not part of it; each tensor is sent by itself, also those of one
        layer.
    """
    stops = range(1, len(trace.tensors) + 1)
    return plan_of("wfbp", trace, stops, reason="one message per gradient, as soon as it is ready")


WFBP = Part(
    name="wfbp",
    summary="wait-free backpropagation: one message per gradient as it gets ready",
    origin=PUBLISHED,
    build=plan_wfbp,
    facts=lambda options: SchedulerFacts(needs_profile=False, baseline=True, tried=("",)),
)


def plan_sequential(trace: Trace, link: Link, options: NoOptions) -> Plan:
    """No overlap: one message with all gradients, after the backward pass.

        E = t_b + a + b (M_1 + ... + M_L)

    E: end of the message (s); t_b: of the backward pass (s); a: start-up (s); b: s/byte; M: bytes.

    Args:
        trace: gives the tensors; times are not used.
        link: not used.
        options: none.

    Raises:
        UsageError: an option is given; there are none.

    Example:
        >>> from testbed.scheduling.protocol import make_plan
        >>> trace = Trace.from_backward([2, 2, 3, 3, 5], num_elements=[3, 4, 1, 1, 1])
        >>> link = Link(backend="gloo", num_workers=4, latency_s=4, seconds_per_byte=1)
        >>> plan = make_plan("sequential", trace, link)
        >>> plan.after_backward, [part.tensor for part in plan.messages[0].parts]
        (True, [4, 3, 2, 1, 0])

    Reference:
        You, Buluc and Demmel, 2017, SC (Sync EASGD packs all layers into one message). Departs:
        gradients of synchronous SGD are averaged, not weights elastically; one message per dtype.
    """
    stops = [len(trace.tensors)] if trace.tensors else []
    reason = "everything in one message after backward; nothing overlaps"
    return plan_of("sequential", trace, stops, after_backward=True, reason=reason)


SEQUENTIAL = Part(
    name="sequential",
    summary="no overlap: one message after the backward pass (full merge)",
    origin=PUBLISHED,
    build=plan_sequential,
    facts=lambda options: SchedulerFacts(
        needs_profile=False, overlaps=False, baseline=True, tried=("",)
    ),
)
