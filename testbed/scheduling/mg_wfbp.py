"""MG-WFBP: merge a gradient into the next one where waiting costs less than a start-up."""

from __future__ import annotations

from testbed.base.axes import SchedulerFacts
from testbed.base.link import Link, merge_gain_s
from testbed.base.parts import PUBLISHED, NoOptions, Part
from testbed.base.plan import Plan
from testbed.base.trace import Trace
from testbed.prediction.timeline import Backward
from testbed.scheduling.build import plan_of, streamed
from testbed.scheduling.processor_time import with_processor_time


def merge_streaming(backward: Backward, link: Link) -> list[int]:
    """Stops of the paper's groups, in one pass.

    The open group would start at s = max(E, R_l), E = end of the group before. The next gradient
    joins it if R_{l-1} - s < a (strictly), else the group closes.

    Example:
        >>> link = Link(backend="x", num_workers=2, latency_s=4, seconds_per_byte=1)
        >>> merge_streaming(Backward((2, 4, 7, 10, 15), (3, 4, 1, 1, 1)), link)
        [4, 5]
    """
    gain_s, ready_s = merge_gain_s(link), backward.ready_s
    return streamed(backward, link, lambda j, start_s, *_: ready_s[j + 1] - start_s < gain_s)


def merge_recomputing(backward: Backward, link: Link) -> list[int]:
    """The stops of `merge_streaming` by the paper's own procedure: its slow reference.

    After each merge all start times are computed anew, O(L^2).
    """
    gain_s = merge_gain_s(link)
    sizes = list(backward.num_bytes)
    merged = [False] * len(sizes)
    for position in range(len(sizes) - 1):
        start_s = _starts_s(backward, sizes, merged, link)
        if backward.ready_s[position + 1] - start_s[position] < gain_s:
            sizes[position + 1] += sizes[position]
            sizes[position], merged[position] = 0, True
    return [position + 1 for position, gone in enumerate(merged) if not gone]


def _starts_s(backward: Backward, sizes: list[int], merged: list[bool], link: Link) -> list[float]:
    starts: list[float] = []
    free_s = 0.0
    for ready, size, gone in zip(backward.ready_s, sizes, merged, strict=True):
        starts.append(max(free_s, ready))
        free_s = starts[-1] + (0.0 if gone else link.time_s(size))
    return starts


def plan_mg_wfbp(trace: Trace, link: Link, options: NoOptions) -> Plan:
    """The merged-gradient groups of the paper's rule, followed exactly.

        for l = L .. 2:  merge l into l-1  iff  R_{l-1} - tau_c(l) < a,  then recompute tau_c

    The rule looks at the next gradient only and is not optimal: where every gap is below a,
    everything ends up in one message, and a larger a may even end earlier. `optimal` is exact under
    the same cost model.

    Args:
        trace: sizes (bytes) and backward times (s).
        link: gives a = `latency_s` (s) and T(M); also of a link with pieces a is `latency_s`.
        options: none.

    Raises:
        UsageError: an option is given; there are none.

    Example:
        >>> from testbed.scheduling.protocol import make_plan
        >>> trace = Trace.from_backward([2, 2, 3, 3, 5], num_elements=[3, 4, 1, 1, 1])
        >>> link = Link(backend="gloo", num_workers=4, latency_s=4, seconds_per_byte=1)
        >>> plan = make_plan("mg-wfbp", trace, link)
        >>> [[part.tensor for part in message.parts] for message in plan.messages]
        [[4, 3, 2, 1], [0]]

    Reference:
        Shi, Chu and Li, 2021, IEEE TPDS 32(8) (INFOCOM 2019). Departs: no minimum tensor size,
        which the authors' later code has (8192 elements); a message's processor time
        counts as start-up where that is predicted to be faster, see `with_processor_time`. A group
        of several dtypes counts as one message, and travels as one for each. A tensor without
        elements is merged like any other, though alone it would cost nothing.
    """
    backward = Backward.of(trace)

    def make(seen: Link) -> Plan:
        stops, gain_s = merge_streaming(backward, seen), merge_gain_s(seen)
        reason = f"{len(stops)} messages: merged where waiting costs less than {gain_s:g} s"
        return plan_of("mg-wfbp", trace, stops, reason=reason)

    return with_processor_time(make, trace, link)


MG_WFBP = Part(
    name="mg-wfbp",
    summary="MG-WFBP, the paper's rule: merge where waiting is cheaper than a start-up",
    origin=PUBLISHED,
    build=plan_mg_wfbp,
    facts=lambda options: SchedulerFacts(tried=("",)),
)
