"""Parts and plan that a run's options ask for, and the group that it is executed in; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from testbed.backends.protocol import Group
from testbed.base.axes import AXES, BACKENDS, COMPRESSORS, SCHEDULERS, WORKLOADS, CompressorFacts
from testbed.base.config import RunConfig
from testbed.base.errors import UsageError
from testbed.base.link import Link
from testbed.base.parts import Axis, Resolved
from testbed.base.plan import Plan
from testbed.base.trace import Trace
from testbed.cluster.spec import dilation_of
from testbed.prediction.timeline import message_bytes
from testbed.scheduling.protocol import make_plan
from testbed.scheduling.tuning import parse_budget
from testbed.workloads.user_file import check_dilation


def parts_of(
    config: RunConfig, axes: Sequence[Axis[Any]] = AXES, *, here: bool = True
) -> dict[str, Resolved[Any]]:
    """The run's part of each axis, by the axis's name; all can be used here, and together.

    Args:
        config: of the run.
        axes: those on which something was chosen; backend and compressor among them.
        here: whether all must be usable on this machine, and not only go together.

    Raises:
        UnknownName, UsageError: a name or an option is wrong, or parts do not go together.
        Unavailable: a part cannot be used here.
    """
    parts = {axis.what: axis.resolve(axis.of(config)) for axis in axes}
    for part in parts.values() if here else ():
        part.usable()
    if WORKLOADS in axes:
        check_dilation(parts[WORKLOADS.what], dilation_of(config.cluster))
    for part in parts.values():
        part.check(config)
    framework = parts[BACKENDS.what].facts.schedule is not None
    if framework and (config.plan is not None or not SCHEDULERS.is_default(config)):
        raise UsageError(
            f"backend {config.backend!r} schedules by itself; leave out --scheduler and --plan"
        )
    if config.tune is not None:
        _check_tune(config)
    if not COMPRESSORS.is_default(config):
        _check_compressor(config, parts[COMPRESSORS.what], framework)
    return parts


def _check_compressor(
    config: RunConfig, compressor: Resolved[CompressorFacts], framework: bool
) -> None:
    what = f"compressor {config.compressor!r}"
    if framework:
        raise UsageError(
            f"{what} compresses what a plan sends, and backend {config.backend!r} exchanges "
            "gradients by itself; use another backend"
        )
    if config.precision == "fp16":
        raise UsageError(
            f"{what} cannot stand beside --precision fp16, whose gradient scale would stay in what "
            "is kept from step to step; use bf16 or float32"
        )
    if any(c.facts.carries_momentum for c in compressor.links) and config.optimizer != "sgd":
        raise UsageError(
            f"{what} does the momentum of SGD itself, and --optimizer is {config.optimizer}; use "
            "sgd, or give the compressor momentum=0"
        )
    compressor.build()  # links may refuse each other


def _check_tune(config: RunConfig) -> None:
    parse_budget(config.tune or "")
    if config.plan is not None:
        raise UsageError("--tune searches what a plan is made with, and --plan is a finished one")
    if not COMPRESSORS.is_default(config):
        raise UsageError(
            f"--tune scores on the link model, which does not know what compressor "
            f"{config.compressor!r} costs here; tune without it and give the knobs by hand"
        )


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
        share: sizes are divided by it, down to a float32: compressed payloads are between a
            hundredth and a half of the messages. A stream that is too short passes with what a
            shaper has saved up, and its bytes seem to take no time.
    """
    sizes = [size for m in plan.messages if (size := message_bytes(plan, m)) >= 4]
    return [max(4, size // share // 4 * 4) for size in sizes]
