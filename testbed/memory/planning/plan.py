"""A memory plan: what becomes of each activation of a step. Frozen, printable, with a digest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import msgspec

from testbed.base.errors import UsageError
from testbed.memory.planning.lifetimes import Action, Footprint, Lifetimes, fetch_order, settled
from testbed.memory.planning.units import saved_bytes, values_by_unit

FORMAT = "testbed.memory-plan/1"


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """By what a value is recognised when it is made.

    Attributes:
        op: number of its operator among those of the forward pass.
        name: of the operator.
        output: which of its outputs.
        num_bytes: of the storage.
    """

    op: int
    name: str
    output: int
    num_bytes: int


class UnitChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What was chosen for a layer, and why, in words and numbers.

    Attributes:
        unit: name of the layer.
        action: of what it saves: keep, recompute, offload, offload_sync, or several joined by `+`.
        num_bytes: that it saves.
        why: the reason.
    """

    unit: str
    action: str
    num_bytes: int
    why: str = ""


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of each value of a step (see `memory.planning.lifetimes`).

    Attributes:
        strategy: that chose, in words.
        values: that the actions are for, in the order of their operators.
        actions: for each value a letter: see `Action`.
        fetch_order: values on the host in the order in which the backward pass wants them.
        units: the choice for each layer.
        peak_bytes: predicted.
        extra_s: predicted, of a step.
        gap: share of what was to be least (`extra_s`, or `peak_bytes` where no budget was given)
            that a better choice may save at most; 0: there is none.
        why: the choice as a whole, in words and numbers.
        in_place: modules whose activation is to overwrite its input.
    """

    strategy: str
    values: tuple[Made, ...] = ()
    actions: str = ""
    fetch_order: tuple[int, ...] = ()
    units: tuple[UnitChoice, ...] = ()
    peak_bytes: int = 0
    extra_s: float = 0.0
    gap: float = 0.0
    why: str = ""
    in_place: tuple[str, ...] = ()
    format: str = FORMAT

    def digest(self) -> str:
        """Of what is carried out; ranks compare it.

        Example:
            >>> MemoryPlan(strategy="none").digest() == MemoryPlan(strategy="none").digest()
            True
        """
        carried_out = (self.values, self.actions, self.fetch_order, self.in_place)
        return hashlib.sha256(msgspec.json.encode(carried_out)).hexdigest()[:16]


def unit_choices(
    lifetimes: Lifetimes, actions: str, why: Callable[[int], str]
) -> tuple[UnitChoice, ...]:
    """The choice for each layer, from an action for each value.

    Args:
        lifetimes: of the step.
        actions: one letter for each value.
        why: the reason, from the number of a layer.
    """
    actions = settled(lifetimes, actions)
    found = []
    for unit, numbers in enumerate(values_by_unit(lifetimes)):
        there = {actions[number] for number in numbers if lifetimes.values[number].uses}
        words = [action.name.lower() for action in Action if action.value in there]
        found.append(
            UnitChoice(
                unit=lifetimes.units[unit],
                action="+".join(words) or Action.KEEP.name.lower(),
                num_bytes=saved_bytes(lifetimes, numbers),
                why=why(unit),
            )
        )
    return tuple(found)


def plan_of(
    strategy: str,
    lifetimes: Lifetimes,
    actions: str,
    footprint: Footprint,
    units: tuple[UnitChoice, ...] = (),
    *,
    gap: float = 0.0,
    why: str = "",
) -> MemoryPlan:
    """The plan that carries out an action for each value of a recorded step.

    Args:
        strategy: that chose.
        lifetimes: of the step.
        actions: one letter for each value.
        footprint: what they take, as simulated.
        units: the choice for each layer, with its reason.
        gap: see `MemoryPlan`.
        why: the choice as a whole.
    """
    actions = settled(lifetimes, actions)
    return MemoryPlan(
        strategy=strategy,
        values=values_of(lifetimes),
        actions=actions,
        fetch_order=fetch_order(lifetimes, actions),
        units=units,
        peak_bytes=footprint.peak_bytes,
        extra_s=footprint.extra_s,
        gap=gap,
        why=why,
    )


def decode_memory_plan(data: bytes, where: str) -> MemoryPlan:
    """Read a saved plan.

    Raises:
        UsageError: it is none, or of another version.
    """
    try:
        plan = msgspec.json.decode(data, type=MemoryPlan)
    except msgspec.DecodeError as error:
        raise UsageError(f"{where} is no memory plan ({error}); expected {FORMAT}") from error
    if plan.format != FORMAT:
        raise UsageError(f"{where} has format {plan.format!r}; expected {FORMAT}")
    return plan


def values_of(lifetimes: Lifetimes) -> tuple[Made, ...]:
    """By what the values of a recorded step are recognised."""
    return tuple(
        Made(
            op=value.op,
            name=lifetimes.ops[value.op].name,
            output=value.output,
            num_bytes=value.num_bytes,
        )
        for value in lifetimes.values
    )
