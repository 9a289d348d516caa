"""Messages that are slices of tensors, and the priorities by which the next forward needs them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from testbed.errors import UsageError
from testbed.prediction.dag import forward_order
from testbed.prediction.trace import ELEMENT_BYTES, Trace
from testbed.scheduling.plan import Message, Part, Plan

MAX_MESSAGES: Final = 1_000_000


class TooManyMessages(UsageError):
    """Slices are so small that a plan of them could be neither kept nor carried out."""


def require_few_messages(trace: Trace, max_elements: Sequence[int], option: str) -> None:
    """Refuse slices so small that a plan of them could be neither kept nor carried out.

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


def slices_of(trace: Trace, index: int, max_elements: int) -> list[Part]:
    """A tensor in slices of so many elements, the last one shorter; an empty tensor in one.

    Example:
        >>> from testbed.prediction.trace import TraceTensor
        >>> tensor = TraceTensor(name="w", num_elements=5, forward_s=1.0, backward_s=1.0)
        >>> trace = Trace(name="t", device="cpu", batch_size=1, tensors=(tensor,))
        >>> [(part.start, part.stop) for part in slices_of(trace, 0, 2)]
        [(0, 2), (2, 4), (4, 5)]
    """
    count = trace.tensors[index].num_elements
    cuts = [*range(0, count, max_elements), count] if count else [0, 0]
    return [Part(index, start, stop) for start, stop in pairwise(cuts)]


def elements_in(trace: Trace, index: int, num_bytes: int) -> int:
    """How many elements of a tensor make up to so many bytes; at least one."""
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
    return Plan(
        scheduler=scheduler,
        names=tuple(t.name for t in trace.tensors),
        num_elements=tuple(t.num_elements for t in trace.tensors),
        dtypes=tuple(t.dtype for t in trace.tensors),
        messages=messages,
        order="priority",
        credit_bytes=credit_bytes,
        crosses_iteration=True,
        reason=reason,
    )


def require_positive(scheduler: str, **values: float) -> None:
    """Check options that must be finite and above 0.

    Raises:
        UsageError: names the first one that is not.
    """
    for name, value in values.items():
        if not 0 < value < float("inf"):
            raise UsageError(f"{scheduler}: {name} is {value}; expected a finite number above 0")
