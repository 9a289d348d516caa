"""Compressed messages on several channels, so that their latencies overlap."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from testbed.scheduling.plan import Plan

Replan = Callable[[Sequence[str]], Plan]


def overlapped(plan: Plan, replan: Replan | None, max_channels: int) -> tuple[Plan, Replan | None]:
    """The plan, and what makes it anew, with messages by turns on up to `max_channels` channels.

    Compressed messages are short: one after another they would wait for each other's start-ups. A
    plan that has channels of its own, or whose order rank 0 decides, stays as it is. A plan made
    anew gets as many channels as the first, for which the backend was opened.
    """
    count = max(1, min(max_channels, len(plan.messages)))
    again = None if replan is None else lambda names: by_turns(replan(names), count)
    return by_turns(plan, count), again


def by_turns(plan: Plan, num_channels: int) -> Plan:
    """The plan with message k on channel k modulo `num_channels`, if it has one fifo channel.

    Example:
        >>> from testbed.scheduling.plan import Message, Part
        >>> messages = tuple(Message(parts=(Part(i, 0, 6),)) for i in range(3))
        >>> plan = Plan(scheduler="x", names=("a", "b", "c"), num_elements=(6,) * 3,
        ...             dtypes=("float32",) * 3, messages=messages)
        >>> [message.channel for message in by_turns(plan, 2).messages]
        [0, 1, 0]
    """
    if plan.order != "fifo" or plan.num_channels > 1:
        return plan
    messages = tuple(
        msgspec.structs.replace(message, channel=number % num_channels)
        for number, message in enumerate(plan.messages)
    )
    return msgspec.structs.replace(plan, num_channels=num_channels, messages=messages)
