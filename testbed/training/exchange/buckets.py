"""Between gradients and messages: which bytes of which gradient lie where in which message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from testbed.base.errors import UsageError
from testbed.base.plan import Message, Plan


class GradientBuckets:
    """The messages of a plan as tensors.

    A message that is a whole gradient, or one slice of it, is a view: nothing is copied. A fused
    message has a buffer of its own, allocated once; gradients are copied in as they become ready
    and copied out when the sum has arrived.

    Args:
        plan: its tensors are those of `parameters`, in the same order.
        parameters: shapes, dtype and device of the gradients.

    Raises:
        UsageError: a message mixes dtypes.
    """

    def __init__(self, plan: Plan, parameters: Sequence[torch.Tensor]) -> None:
        self._messages = plan.messages
        self._buffers: list[torch.Tensor | None] = [
            self._allocate(message, plan, parameters) for message in plan.messages
        ]
        self.messages_of: list[list[int]] = [[] for _ in parameters]
        for number, message in enumerate(plan.messages):
            for tensor in dict.fromkeys(part.tensor for part in message.parts):
                self.messages_of[tensor].append(number)

    def put(self, number: int, tensor: int, gradient: torch.Tensor) -> None:
        """The gradient of a tensor is ready: copy its share into the message's buffer."""
        buffer = self._buffers[number]
        if buffer is not None:
            for start, part_start, part_stop in self._places(number, tensor):
                length = part_stop - part_start
                buffer[start : start + length].copy_(gradient.view(-1)[part_start:part_stop])

    def payload(self, number: int, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """The tensor that travels for a message whose gradients are all ready."""
        buffer = self._buffers[number]
        if buffer is not None:
            return buffer
        (part,) = self._messages[number].parts
        gradient = gradients[part.tensor]
        assert gradient is not None
        whole = part.start == 0 and part.stop == gradient.numel()
        return gradient if whole else gradient.view(-1)[part.start : part.stop]

    def take(self, number: int, tensor: int, gradient: torch.Tensor) -> None:
        """The sum has arrived: copy a tensor's share out of the message's buffer."""
        buffer = self._buffers[number]
        if buffer is not None:
            for start, part_start, part_stop in self._places(number, tensor):
                length = part_stop - part_start
                gradient.view(-1)[part_start:part_stop].copy_(buffer[start : start + length])

    def _places(self, number: int, tensor: int) -> list[tuple[int, int, int]]:
        """(offset in the message, first element, end) of each of the tensor's parts in it."""
        places, offset = [], 0
        for part in self._messages[number].parts:
            if part.tensor == tensor:
                places.append((offset, part.start, part.stop))
            offset += part.stop - part.start
        return places

    def _allocate(
        self, message: Message, plan: Plan, parameters: Sequence[torch.Tensor]
    ) -> torch.Tensor | None:
        if len(message.parts) == 1:
            return None
        owners = [parameters[part.tensor] for part in message.parts]
        if len({owner.dtype for owner in owners}) > 1:
            names = ", ".join(plan.names[part.tensor] for part in message.parts[:4])
            raise UsageError(
                f"the plan fuses tensors of different dtypes ({names}, ...) into one message; plan "
                "each dtype by itself"
            )
        size = sum(part.stop - part.start for part in message.parts)
        return torch.zeros(size, dtype=owners[0].dtype, device=owners[0].device)


def describe_messages(plan: Plan) -> list[str]:
    """Names of all messages, each different from the others."""
    names = [describe_message(plan, number) for number in range(len(plan.messages))]
    twice = {name for name, count in Counter(names).items() if count > 1}
    return [f"{name} #{i}" if name in twice else name for i, name in enumerate(names)]


def describe_message(plan: Plan, number: int) -> str:
    """A message's name in errors, event records and on servers; equal on all ranks.

    Example:
        >>> from testbed.base.plan import Message, TensorSlice
        >>> plan = Plan(scheduler="x", names=("a", "b"), num_elements=(4, 2),
        ...             dtypes=("float32",) * 2,
        ...             messages=(Message(parts=(TensorSlice(1, 0, 2), TensorSlice(0, 0, 2))),
        ...                       Message(parts=(TensorSlice(0, 2, 4),))))
        >>> describe_message(plan, 0), describe_message(plan, 1)
        ('b..a (2 parts)', 'a[2:4]')
    """
    parts = plan.messages[number].parts
    first, last = parts[0], parts[-1]
    if len(parts) > 1:
        return f"{plan.names[first.tensor]}..{plan.names[last.tensor]} ({len(parts)} parts)"
    whole = first.start == 0 and first.stop == plan.num_elements[first.tensor]
    name = plan.names[first.tensor]
    return name if whole else f"{name}[{first.start}:{first.stop}]"
