"""`testbed.plan/1`: a schedule as frozen data, executed by the engine and by the simulator alike.

Rules that depend on the run (credit, preemption) are data here; the engine and the simulator apply
them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from testbed.base.dtypes import ELEMENT_BYTES
from testbed.base.errors import UsageError
from testbed.base.files import read_file, read_object, to_json

MIN_PERIOD_S: Final = 1e-6  # shorter ones would be lost in the rounding of times


def is_period(period_s: float) -> bool:
    """Whether a loop can have this period: 0, or finite and at least 1 us.

    Example:
        >>> is_period(0.0), is_period(1e-3), is_period(1e-300), is_period(float("nan"))
        (True, True, False, False)
    """
    return period_s == 0 or MIN_PERIOD_S <= period_s < inf


PLAN_SCHEMA: Final = "testbed.plan/1"


class TensorSlice(msgspec.Struct, frozen=True, array_like=True):
    """A slice of one tensor.

    Attributes:
        tensor: index in forward order.
        start: first element.
        stop: one past the last element.
    """

    tensor: int
    start: int
    stop: int


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Slices of tensors that are sent as one buffer.

    Attributes:
        parts: in the order in which they lie in the message.
        channel: on which it travels.
        priority: smaller is more urgent; only looked at where the plan's order is `priority`.
        ratio: share of its elements that a sparse compressor sends, instead of the compressor's
            own; None = the compressor's own.
    """

    parts: tuple[TensorSlice, ...]
    channel: int = 0
    priority: int = 0
    ratio: float | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How the gradients of one iteration are exchanged.

    Attributes:
        scheduler: specification that made it.
        names: parameter names, in forward order; with `num_elements` and `dtypes` the plan's model.
        num_elements: of each tensor.
        dtypes: of each gradient.
        messages: every element of every tensor in exactly one part. A message is ready when its
            last tensor is. With order `fifo` the messages of a channel start in this order, each
            as soon as it is ready and the one before has ended.
        order: `fifo`, or `priority`: among the ready messages the most urgent one starts next.
        num_channels: exchanges under way at once.
        credit_bytes: with `priority`: bytes that may be chosen and not ended on a channel before
            the next choice; None = one message at a time. They travel one after another.
        after_backward: nothing starts before the whole backward pass has ended.
        crosses_iteration: parameters are updated just before their layer's next forward, each as
            soon as its own messages have ended.
        halves: the sum is cut in two: fold (reduce-scatter, push) during backward, spread
            (all-gather, pull) before and during the next forward, first layers first.
        tick_s: messages were packed at ticks of a background loop with this period; None = none.
            The simulator starts them at ticks; the engine as soon as they are ready, which is at
            most one period earlier.
        tick_blocking: the loop waits for its messages before it ticks again.
        reason: in words, why the scheduler decided so.
    """

    scheduler: str
    names: tuple[str, ...]
    num_elements: tuple[int, ...]
    dtypes: tuple[str, ...]
    messages: tuple[Message, ...]
    order: Literal["fifo", "priority"] = "fifo"
    num_channels: int = 1
    credit_bytes: int | None = None
    after_backward: bool = False
    crosses_iteration: bool = False
    halves: bool = False
    tick_s: float | None = None
    tick_blocking: bool = False
    reason: str = ""

    def digest(self) -> str:
        """SHA-256 of everything but `reason`; ranks compare it before the first step."""
        plain = msgspec.structs.replace(self, reason="")
        return hashlib.sha256(msgspec.json.encode(to_builtins(plain))).hexdigest()


def to_builtins(plan: Plan) -> dict[str, Any]:
    """The plan as plain values, as it is written to files and digested.

    A ratio that a message does not have is left out, so that plans of dense messages keep the
    digests and files that they had before there were ratios.
    """
    raw: dict[str, Any] = msgspec.to_builtins(plan)
    for message in raw["messages"]:
        if message["ratio"] is None:
            del message["ratio"]
    return raw


# Plans as JSON files, checked when they are read.


def encode_plan(plan: Plan) -> bytes:
    """The plan as indented JSON."""
    raw: dict[str, Any] = {"schema": PLAN_SCHEMA, **to_builtins(plan)}
    return to_json(raw)


def decode_plan(data: bytes, where: str = "plan") -> Plan:
    """A plan from JSON; the inverse of `encode_plan`.

    Raises:
        UsageError: no JSON, a wrong key, or a plan that cannot be executed; names the place.
    """
    raw = read_object(data, PLAN_SCHEMA, where)
    del raw["schema"]
    try:
        plan = msgspec.convert(raw, Plan)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {error} ($ is the whole file)") from error
    problem = plan_problem(plan)
    if problem:
        raise UsageError(f"{where}: {problem}")
    return plan


def load_plan(path: str | Path) -> Plan:
    """A plan from a `testbed.plan/1` file.

    Raises:
        UsageError: no such file, or see `decode_plan`.
    """
    return decode_plan(read_file(path), str(path))


def plan_problem(plan: Plan) -> str | None:
    """Why a plan cannot be executed, None if it can: every element in exactly one part."""
    count = len(plan.names)
    if not count == len(plan.num_elements) == len(plan.dtypes):
        return "keys 'names', 'num_elements' and 'dtypes' differ in length; expected one per tensor"
    if unknown := set(plan.dtypes) - set(ELEMENT_BYTES):
        return f"dtypes {sorted(unknown)} are unknown; expected some of {', '.join(ELEMENT_BYTES)}"
    if plan.num_channels < 1:
        return f"key 'num_channels' is {plan.num_channels}; expected 1 or more"
    if plan.credit_bytes is not None and plan.credit_bytes < 1:
        return f"key 'credit_bytes' is {plan.credit_bytes}; expected 1 or more, or null for none"
    if plan.tick_s is not None and not is_period(plan.tick_s):
        return f"key 'tick_s' is {plan.tick_s:g}; expected 0, or 1e-6 or more, or null for none"
    slices: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for index, message in enumerate(plan.messages):
        if not 0 <= message.channel < plan.num_channels:
            return (
                f"message {index} is on channel {message.channel}; "
                f"expected 0 .. {plan.num_channels - 1}"
            )
        if message.ratio is not None and not 0 < message.ratio <= 1:
            return f"message {index} has ratio {message.ratio:g}; expected 0 < ratio <= 1"
        for part in message.parts:
            if not 0 <= part.tensor < count:
                return f"message {index} has tensor {part.tensor}; expected 0 .. {count - 1}"
            slices[part.tensor].append((part.start, part.stop))
        if len({plan.dtypes[part.tensor] for part in message.parts}) > 1:
            return f"message {index} mixes dtypes; expected one dtype per message"
    for tensor, found in enumerate(slices):
        if problem := _cover_problem(sorted(found), plan.num_elements[tensor]):
            return f"tensor {tensor} ({plan.names[tensor]!r}): {problem}"
    return None


def _cover_problem(slices: list[tuple[int, int]], num_elements: int) -> str | None:
    at = 0
    for start, stop in slices:
        if start != at or stop < start:
            return f"slice {start}:{stop} follows element {at}; expected a slice that starts there"
        at = stop
    if at != num_elements or not slices:
        return (
            f"slices end at {at if slices else 'none'}; expected to cover {num_elements} elements"
        )
    return None


def check_plan(plan: Plan, names: Sequence[str], sizes: Sequence[int]) -> None:
    """Check that the plan was made for these tensors, in whatever order.

    Raises:
        UsageError: says which tensor differs, or what is wrong with the plan itself.
    """
    problem = plan_problem(plan)
    if problem is not None:
        raise UsageError(f"plan of {plan.scheduler!r}: {problem}")
    ours = dict(zip(names, sizes, strict=True))
    theirs = dict(zip(plan.names, plan.num_elements, strict=True))
    differing = [n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n)]
    if differing:
        name = min(differing)
        raise UsageError(
            f"plan of {plan.scheduler!r} is for another model: tensor {name!r} has "
            f"{theirs.get(name, 'no')} elements in the plan and {ours.get(name, 'no')} in the "
            "model; make the plan from this model's own trace"
        )
