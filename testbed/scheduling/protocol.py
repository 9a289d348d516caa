"""What a scheduler is: a pure function from a trace and a link to a frozen plan."""

from __future__ import annotations

import msgspec

from testbed.base.axes import SCHEDULERS
from testbed.base.link import Link
from testbed.base.plan import Plan
from testbed.base.trace import Trace


def needs_profile(spec_text: str) -> bool:
    """Whether a scheduler with its options plans from times; else sizes alone decide.

    Raises:
        UnknownName: no scheduler of this name; the message lists the known ones.
        UsageError: an option that the scheduler does not have, or a value it cannot use.

    Example:
        >>> [needs_profile(s) for s in ("bucket", "bucket:timeout_ms=5", "mg-wfbp")]
        [False, True, True]
    """
    return SCHEDULERS.resolve(spec_text).facts.needs_profile


def make_plan(spec_text: str, trace: Trace, link: Link) -> Plan:
    """The plan of a scheduler given as `name` or `name:key=value,...`.

    Raises:
        UnknownName: no scheduler of this name; the message lists the known ones.
        UsageError: an option that the scheduler does not have, or a value it cannot use.

    Example:
        >>> from testbed.base.trace import TraceTensor
        >>> tensor = TraceTensor(name="w", num_elements=8, forward_s=1.0, backward_s=2.0)
        >>> trace = Trace(name="t", device="cpu", batch_size=1, tensors=(tensor, tensor))
        >>> link = Link(backend="x", num_workers=2, latency_s=1e-3, seconds_per_byte=1e-9)
        >>> len(make_plan("wfbp", trace, link).messages)
        2
    """
    scheduler = SCHEDULERS.resolve(spec_text)
    plan: Plan = scheduler.build(trace, link)
    return msgspec.structs.replace(plan, scheduler=scheduler.text)
