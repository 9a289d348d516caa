"""What a scheduler is: a pure function from a trace and a link to a frozen plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from testbed.base.link import Link
from testbed.base.parts import SCHEDULERS, parse_options, parse_spec
from testbed.base.plan import Plan
from testbed.base.trace import Trace


class Planner(Protocol):
    """Decides which bytes leave together, in which order and on which channel."""

    def __call__(self, trace: Trace, link: Link, options: Any, /) -> Plan:
        """The plan for this trace on this link; deterministic, without I/O."""
        ...


@dataclass(frozen=True)
class SchedulerKind:
    """An entry of the scheduler registry.

    Attributes:
        name: what the command line calls it.
        summary: one line for `testbed list`.
        options: frozen dataclass of the options that `name:key=value` may set.
        plan: the planner.
        needs_profile: whether the plan with these options depends on times; else sizes alone
            decide.
        crosses_iteration: whether messages may still travel during the next forward pass.
        probe: None when usable here, else (reason, what to install).
    """

    name: str
    summary: str
    options: type
    plan: Planner
    needs_profile: Callable[[Any], bool] = lambda options: True
    crosses_iteration: bool = False
    probe: Callable[[], tuple[str, str] | None] = lambda: None


@dataclass(frozen=True)
class NoOptions:
    """For schedulers that have nothing to choose."""


def resolve_scheduler(spec_text: str) -> tuple[SchedulerKind, Any]:
    """A scheduler's kind and checked options.

    Raises:
        UnknownName: no scheduler of this name; the message lists the known ones.
        UsageError: an option that the scheduler does not have, or a value it cannot use.
    """
    spec = parse_spec(spec_text)
    kind: SchedulerKind = SCHEDULERS.load(spec.name)
    return kind, parse_options(spec.name, spec.options, kind.options)


def needs_profile(spec_text: str) -> bool:
    """Whether a scheduler with its options plans from times; else sizes alone decide.

    Raises:
        UnknownName: no scheduler of this name; the message lists the known ones.
        UsageError: an option that the scheduler does not have, or a value it cannot use.

    Example:
        >>> [needs_profile(s) for s in ("bucket", "bucket:timeout_ms=5", "mg-wfbp")]
        [False, True, True]
    """
    kind, options = resolve_scheduler(spec_text)
    return kind.needs_profile(options)


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
    kind, options = resolve_scheduler(spec_text)
    plan = kind.plan(trace, link, options)
    return msgspec.structs.replace(plan, scheduler=str(parse_spec(spec_text)))
