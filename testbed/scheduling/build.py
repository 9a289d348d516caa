"""Groups of gradients that are neighbours in backward order, and the plans made of them.

*Stops* are the backward positions at which groups end, increasing; the last one is L.
Stops [2, 5] of five tensors are the groups {4, 3}, {2, 1, 0} of forward indices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, Final

from testbed.base.dtypes import ELEMENT_BYTES
from testbed.base.errors import UsageError
from testbed.base.link import Link
from testbed.base.plan import Message, Plan, TensorSlice
from testbed.base.trace import Trace
from testbed.prediction.cross_iteration import forward_order
from testbed.prediction.timeline import Backward


def add_then_close(
    num_bytes: Sequence[float], limit_bytes: float, first_limit_bytes: float | None = None
) -> list[int]:
    """Close a group with the tensor that fills it to the limit (PyTorch DDP's buckets).

    Args:
        num_bytes: of each gradient, in backward order.
        limit_bytes: 0 = every tensor alone.
        first_limit_bytes: limit of the first group; None = the same.

    Returns:
        Stops.

    Example:
        >>> add_then_close([3, 4, 1, 1, 1], 4)
        [2, 5]
    """
    stops: list[int] = []
    open_bytes = 0.0
    for position, size in enumerate(num_bytes, start=1):
        open_bytes += size
        limit = limit_bytes if stops or first_limit_bytes is None else first_limit_bytes
        if open_bytes >= limit or position == len(num_bytes):
            stops.append(position)
            open_bytes = 0.0
    return stops


def close_before_exceed(num_bytes: Sequence[float], limit_bytes: float) -> list[int]:
    """Close a group before the tensor that would exceed the limit (Horovod's packing).

    A tensor above the limit is a group of its own.

    Example:
        >>> close_before_exceed([3, 4, 1, 1, 1], 4)
        [1, 2, 5]
    """
    stops: list[int] = []
    open_bytes = 0.0
    for position, size in enumerate(num_bytes):
        if position > 0 and open_bytes + size > limit_bytes:
            stops.append(position)
            open_bytes = 0.0
        open_bytes += size
    return [*stops, len(num_bytes)] if num_bytes else []


def close_on_timeout(
    ready_s: Sequence[float], num_bytes: Sequence[float], limit_bytes: float, timeout_s: float
) -> list[int]:
    """Close a group at the limit, or when backward has run so long since the last one closed.

    Example:
        >>> close_on_timeout([2, 4, 7, 10, 15], [3, 4, 1, 1, 1], float("inf"), 5)
        [3, 5]
    """
    stops: list[int] = []
    open_bytes, closed_s = 0.0, 0.0
    for position, (now_s, size) in enumerate(zip(ready_s, num_bytes, strict=True), start=1):
        open_bytes += size
        full = open_bytes >= limit_bytes or now_s - closed_s >= timeout_s
        if full or position == len(num_bytes):
            stops.append(position)
            open_bytes, closed_s = 0.0, now_s
    return stops


def streamed(
    backward: Backward, link: Link, keep_open: Callable[[int, float, float, int], bool]
) -> list[int]:
    """Stops of groups that travel on one channel, formed in one pass over the gradients.

        s = max(E, R_l);  where the group is closed E = s + T(bytes)

    Args:
        backward: ready times and sizes, in backward order.
        link: gives T(M).
        keep_open: whether the open group, which ends with gradient `position`, takes in the next
            one, too: `keep_open(position, s, E, bytes)`.
    """
    stops: list[int] = []
    open_bytes, free_s = 0, 0.0
    last = len(backward) - 1
    for position, size in enumerate(backward.num_bytes):
        open_bytes += size
        start_s = max(free_s, backward.ready_s[position])
        if position < last and keep_open(position, start_s, free_s, open_bytes):
            continue
        stops.append(position + 1)
        free_s = start_s + link.time_s(open_bytes)
        open_bytes = 0
    return stops


def groups_of(stops: Sequence[int], num_tensors: int) -> list[list[int]]:
    """Forward indices of each group, in backward order.

    Example:
        >>> groups_of([2, 5], 5)
        [[4, 3], [2, 1, 0]]
    """
    starts = [0, *stops]
    return [
        [num_tensors - 1 - p for p in range(start, stop)]
        for start, stop in zip(starts, stops, strict=False)
    ]


def stops_of(plan: Plan) -> list[int]:
    """The stops of a plan of whole tensors in backward order; the inverse of `plan_of`."""
    stops: list[int] = []
    for message in plan.messages:
        stops.append((stops[-1] if stops else 0) + len(message.parts))
    return stops


def serial_stops(plan: Plan) -> list[int] | None:
    """The stops of a plan whose messages travel one after another within the backward pass.

    None for other plans: several channels, slices, priorities, halves, mixed dtypes.
    """
    alone = plan.num_channels == 1 and plan.order == "fifo"
    if not alone or plan.halves or plan.crosses_iteration:
        return None
    sent = [part.tensor for message in plan.messages for part in message.parts]
    if sent != list(reversed(range(len(plan.names)))):
        return None
    return stops_of(plan)


def plan_of(
    scheduler: str,
    trace: Trace,
    stops: Sequence[int],
    *,
    channels: Sequence[int] | None = None,
    num_channels: int = 1,
    after_backward: bool = False,
    reason: str = "",
) -> Plan:
    """The plan that sends these groups of whole tensors, in backward order.

    A message is one buffer of one dtype: a group of several dtypes becomes one message per dtype,
    in the order in which their last gradients are ready.

    Args:
        scheduler: specification that made it.
        trace: the model.
        stops: of the groups, the last one the number of tensors.
        channels: of each group; None = all on channel 0.
        num_channels: messages under way at once.
        after_backward: see `Plan`.
        reason: in words.
    """
    groups = groups_of(stops, len(trace.tensors))
    messages: list[Message] = []
    for group, channel in zip(groups, channels or [0] * len(groups), strict=True):
        for members in _by_dtype(trace, group):
            parts = tuple(TensorSlice(i, 0, trace.tensors[i].num_elements) for i in members)
            messages.append(Message(parts=parts, channel=channel))
    return plan_for(
        scheduler,
        trace,
        messages,
        num_channels=num_channels,
        after_backward=after_backward,
        reason=reason,
    )


def plan_for(scheduler: str, trace: Trace, messages: Iterable[Message], **rules: Any) -> Plan:
    """The plan of these messages for the tensors of a trace; `rules` are other fields of `Plan`."""
    return Plan(
        scheduler=scheduler,
        names=tuple(t.name for t in trace.tensors),
        num_elements=tuple(t.num_elements for t in trace.tensors),
        dtypes=tuple(t.dtype for t in trace.tensors),
        messages=tuple(messages),
        **rules,
    )


def _by_dtype(trace: Trace, group: list[int]) -> list[list[int]]:
    members: dict[str, list[int]] = {}
    for index in group:
        members.setdefault(trace.tensors[index].dtype, []).append(index)
    return sorted(members.values(), key=lambda m: -m[-1])


# Messages that are slices of tensors, with the priority in which the next forward pass needs them.

MAX_MESSAGES: Final = 1_000_000


class TooManyMessages(UsageError):
    """Slices so small that the plan would have more than a million messages."""


def require_few_messages(trace: Trace, max_elements: Sequence[int], option: str) -> None:
    """Refuse slices so small that the plan would have more than a million messages.

    Args:
        trace: the model.
        max_elements: per slice, for each tensor.
        option: that makes slices larger, as in `p3: slice_elements`.

    Raises:
        TooManyMessages: more than a million of them.
    """
    count = sum(
        -(-tensor.num_elements // limit)
        for tensor, limit in zip(trace.tensors, max_elements, strict=True)
    )
    if count > MAX_MESSAGES:
        raise TooManyMessages(
            f"{option} cuts {trace.name!r} into {count} messages; expected {MAX_MESSAGES} at most; "
            "raise it"
        )


def slices_of(trace: Trace, index: int, max_elements: int) -> list[TensorSlice]:
    """A tensor in slices of `max_elements`, the last one shorter; an empty tensor in one slice.

    Example:
        >>> from testbed.base.trace import TraceTensor
        >>> tensor = TraceTensor(name="w", num_elements=5, forward_s=1.0, backward_s=1.0)
        >>> trace = Trace(name="t", device="cpu", batch_size=1, tensors=(tensor,))
        >>> [(part.start, part.stop) for part in slices_of(trace, 0, 2)]
        [(0, 2), (2, 4), (4, 5)]
    """
    count = trace.tensors[index].num_elements
    cuts = [*range(0, count, max_elements), count] if count else [0, 0]
    return [TensorSlice(index, start, stop) for start, stop in pairwise(cuts)]


def elements_in(trace: Trace, index: int, num_bytes: int) -> int:
    """The elements of a tensor that fit into `num_bytes`, at least one."""
    return max(1, num_bytes // ELEMENT_BYTES[trace.tensors[index].dtype])


def forward_ranks(trace: Trace) -> list[int]:
    """For each tensor its position in the forward pass; smaller is more urgent."""
    ranks = [0] * len(trace.tensors)
    for rank, index in enumerate(forward_order(trace)):
        ranks[index] = rank
    return ranks


def sliced_plan(
    scheduler: str,
    trace: Trace,
    max_elements: Sequence[int],
    *,
    credit_bytes: int | None,
    reason: str,
) -> Plan:
    """Slices in the order in which backward makes them ready, sent by forward priority.

    Args:
        scheduler: specification that made it.
        trace: the model.
        max_elements: per slice, for each tensor.
        credit_bytes: see `Plan`.
        reason: in words.

    Raises:
        UsageError: a bad DAG in the trace.
    """
    ranks = forward_ranks(trace)
    messages = tuple(
        Message(parts=(part,), priority=ranks[index])
        for index in reversed(range(len(trace.tensors)))
        for part in slices_of(trace, index, max_elements[index])
    )
    return priority_plan(scheduler, trace, messages, credit_bytes=credit_bytes, reason=reason)


def priority_plan(
    scheduler: str,
    trace: Trace,
    messages: tuple[Message, ...],
    *,
    credit_bytes: int | None,
    reason: str,
) -> Plan:
    """A plan on one channel whose messages go by priority and may end during the next forward."""
    return plan_for(
        scheduler,
        trace,
        messages,
        order="priority",
        credit_bytes=credit_bytes,
        crosses_iteration=True,
        reason=reason,
    )


def require_positive(scheduler: str, **values: float) -> None:
    """Check options that must be above 0 and finite, in bytes as well.

    Raises:
        UsageError: names the first one that is not.
    """
    for name, value in values.items():
        if not 0 < value < 1e300:
            raise UsageError(f"{scheduler}: {name} is {value}; expected a finite number above 0")
