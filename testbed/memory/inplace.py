"""Activations that overwrite their input, where nobody needs it any more."""

from __future__ import annotations

from typing import Final

import msgspec

from testbed.base.parts import PUBLISHED, NoOptions, Part
from testbed.base.units import format_bytes
from testbed.memory.planning.lifetimes import KEEP, Lifetimes, overwritten
from testbed.memory.planning.plan import MemoryPlan, plan_of
from testbed.memory.planning.simulator import simulate
from testbed.memory.strategy import Limits, Strategy

# Operators whose gradient needs their result and not their input, so that it may be overwritten.
OVERWRITING: Final = frozenset({"aten.relu.default"})


def overwrite(options: NoOptions) -> Strategy:
    """Let ReLU modules write their result over their input, on top of those that do already.

        saved bytes = sum of the inputs that neither autograd nor another operator needs

    A module (`torch.nn.ReLU`) is switched to `inplace=True` if in the recorded step nobody saves
    or reads what it reads, in any of its calls. What that gains is told; 0 is right for models that
    overwrite already. The numbers stay the same, bit for bit. Functional calls (`F.relu`) stay as
    they are.

    Args:
        options: none.

    Raises:
        UsageError: an option was given, and there is none.

    Example:
        >>> overwrite(NoOptions()).release is None
        True

    Reference:
        Chen et al., 2016, arXiv:1604.06174 (in-place operators). Departs: which modules may is
        found in a recorded step; inputs and outputs of normalisation stay.
    """

    def choose(lifetimes: Lifetimes, limits: Limits) -> MemoryPlan:
        actions = KEEP * len(lifetimes.values)
        found = may_overwrite(lifetimes)
        before = simulate(lifetimes, actions, limits.costs).peak_bytes
        footprint = simulate(overwritten(lifetimes, found), actions, limits.costs)
        gain = format_bytes(before - footprint.peak_bytes)
        why = f"{len(found)} modules overwrite their input beside those that did; peak {gain} lower"
        plan = plan_of("inplace", lifetimes, actions, footprint, why=why)
        return msgspec.structs.replace(plan, in_place=found)

    return Strategy(choose=choose)


def may_overwrite(lifetimes: Lifetimes) -> tuple[str, ...]:
    """ReLU modules all of whose operators may overwrite what they read.

    Args:
        lifetimes: of the step.
    """
    readers: dict[int, int] = {}
    for value in lifetimes.values:
        for source in value.inputs:
            readers[source] = readers.get(source, 0) + 1
    allowed: dict[str, bool] = {}
    for value in lifetimes.values:
        op = lifetimes.ops[value.op]
        read = value.inputs
        free = (
            op.name in OVERWRITING
            and len(read) == 1
            and readers[read[0]] == 1
            and not lifetimes.values[read[0]].uses
            and lifetimes.values[read[0]].num_bytes == value.num_bytes
            # Whoever else holds it (a shortcut) keeps it alive beyond the operator.
            and lifetimes.values[read[0]].dies <= value.born + SOON
        )
        name = lifetimes.units[op.unit]
        allowed[name] = allowed.get(name, True) and free
    return tuple(name for name, free in allowed.items() if free and name in lifetimes.relus)


SOON: Final = 4  # positions between an operator's result and the death of what only it read


INPLACE = Part(
    name="inplace",
    summary="ReLU modules overwrite their input, where nobody needs it",
    origin=PUBLISHED,
    build=overwrite,
)
