"""The plan that a run's options ask for, and the group that it is executed in; pure."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from testbed.backends.protocol import Group
from testbed.base.axes import SCHEDULERS
from testbed.base.config import RunConfig
from testbed.base.link import Link
from testbed.base.plan import Plan
from testbed.base.trace import Trace
from testbed.prediction.timeline import message_bytes
from testbed.scheduling.protocol import make_plan


def why_whole(config: RunConfig) -> str:
    """What makes every step wait for the whole mean gradient, in words; empty = nothing.

    Then no message travels during the next forward pass, whatever the plan allows.

    Example:
        >>> why_whole(RunConfig(clip_norm=1.0)), why_whole(RunConfig())
        ('--clip-norm', '')
    """
    if config.clip_norm is not None:
        return "--clip-norm"
    return "--precision fp16 (its gradient scaler)" if config.precision == "fp16" else ""


def plan_for(config: RunConfig, trace: Trace, link: Link) -> Plan:
    """The scheduler's plan; none is chosen for an overlap that this run cannot have."""
    why, scheduler = why_whole(config), SCHEDULERS.resolve(config.scheduler)
    within = scheduler.facts.within_iteration
    if not why or within is None:
        return make_plan(config.scheduler, trace, link)
    plan: Plan = scheduler.with_options(within).build(trace, link)
    reason = f"{plan.reason}; without overlap with the next forward pass, because of {why}"
    return msgspec.structs.replace(plan, scheduler=scheduler.text, reason=reason)


def group_for(plan: Plan, group: Group) -> Group:
    """The group with the order, channels and credit that the plan asks for."""
    return replace(
        group,
        order=plan.order,
        num_channels=max(plan.num_channels, group.num_channels),
        credit_bytes=plan.credit_bytes,
    )


def stream_of(plan: Plan, share: int = 1) -> list[int]:
    """Bytes of a plan's messages in their order; what is smaller than a float32 is left out.

    Args:
        plan: of the messages.
        share: each counts as so many times shorter, down to a float32. Compressed payloads are
            between a hundredth and a half of the messages. Without any row as long as these a
            shaper lets all pass that it has saved up, and bytes seem to take no time.
    """
    sizes = [size for m in plan.messages if (size := message_bytes(plan, m)) >= 4]
    return [max(4, size // share // 4 * 4) for size in sizes]
