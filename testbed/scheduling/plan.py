"""`testbed.plan/1`: a schedule as frozen data, executed by the engine and by the simulator alike.

Rules that need facts of the run (credit, preemption) are data here, not code: whoever executes the
plan applies them.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final, Literal

import msgspec

PLAN_SCHEMA: Final = "testbed.plan/1"


class Part(msgspec.Struct, frozen=True, array_like=True):
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
    """What travels together.

    Attributes:
        parts: in the order in which they lie in the message.
        channel: on which it travels.
        priority: smaller is more urgent; only looked at where the plan's order is `priority`.
        ratio: share of its elements that a sparse compressor sends, instead of the compressor's
            own; None = the compressor's own.
    """

    parts: tuple[Part, ...]
    channel: int = 0
    priority: int = 0
    ratio: float | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One iteration's exchange.

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
        credit_bytes: with `priority`: bytes that may be under way on a channel before the next
            choice; None = one message at a time.
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
        """SHA-256 of everything but the words; ranks compare it before the first step."""
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
