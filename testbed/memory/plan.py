"""A memory plan: what becomes of each activation of a step. Frozen, printable, with a digest."""

from __future__ import annotations

import hashlib

import msgspec

from testbed.base.errors import UsageError
from testbed.memory.lifetimes import Lifetimes

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
    """What was chosen for a layer, and why, in words and numbers."""

    unit: str
    action: str
    num_bytes: int
    why: str = ""


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of each value of a step (see `memory.lifetimes`).

    Attributes:
        strategy: that chose, in words.
        values: that the actions are for, in the order of their operators.
        actions: for each value a letter: keep, recompute, offload.
        fetch_order: values on the host in the order in which the backward pass wants them.
        units: the choice for each layer.
        peak_bytes: predicted.
        extra_s: predicted, of a step.
        gap: how much `extra_s` may lie above the best choice's, as a share; 0: it is the best.
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
