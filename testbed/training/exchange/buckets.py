"""Between gradients and messages: which elements of which gradient lie where in which message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from testbed.base.errors import UsageError
from testbed.base.plan import Message, Plan


class GradientBuckets:
    """The messages of a plan as tensors.

    A message that is a whole gradient, or one slice of it, is a view: nothing is copied. A fused
    message (a bucket) has a buffer of its own, allocated once; gradients are copied in as they
    become ready and copied out when the result has arrived.

    Args:
        plan: its tensors are those of `parameters`, in the same order.
        parameters: shapes, dtype and device of the gradients.

    Attributes:
        keys: name of each message, unique, equal on all ranks.
        num_tensors: for each message, of how many tensors it holds elements.
        messages_of: for each tensor, the messages that hold elements of it.
        messages_on: for each channel, its messages in the plan's order.

    Raises:
        UsageError: a message mixes dtypes.
    """

    def __init__(self, plan: Plan, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.plan, self.parameters = plan, parameters
        self.keys = describe_messages(plan)
        # For each message and tensor: (first in the message, end, first in the tensor, end).
        self._places: list[dict[int, list[tuple[int, int, int, int]]]] = []
        self.messages_of: list[list[int]] = [[] for _ in parameters]
        for number, message in enumerate(plan.messages):
            places: dict[int, list[tuple[int, int, int, int]]] = {}
            offset = 0
            for part in message.parts:
                end = offset + part.stop - part.start
                places.setdefault(part.tensor, []).append((offset, end, part.start, part.stop))
                offset = end
            for tensor in places:
                self.messages_of[tensor].append(number)
            self._places.append(places)
        self.messages_on = [
            [number for number, message in enumerate(plan.messages) if message.channel == channel]
            for channel in range(plan.num_channels)
        ]
        self.num_tensors = [len(places) for places in self._places]
        self._buffers = [self._allocate(message) for message in plan.messages]

    def put(self, number: int, tensor: int, gradient: torch.Tensor) -> None:
        """Copy the tensor's share of a message into the message's buffer, if it has one."""
        buffer = self._buffers[number]
        if buffer is not None:
            for low, high, start, stop in self._places[number][tensor]:
                buffer[low:high].copy_(gradient.view(-1)[start:stop])

    def payload(self, number: int, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """The tensor to be exchanged for a message whose gradients are all ready."""
        buffer = self._buffers[number]
        if buffer is not None:
            return buffer
        (part,) = self.plan.messages[number].parts
        gradient = gradients[part.tensor]
        assert gradient is not None
        whole = part.start == 0 and part.stop == gradient.numel()
        return gradient if whole else gradient.view(-1)[part.start : part.stop]

    def take(self, number: int, tensor: int, gradient: torch.Tensor) -> None:
        """Copy the tensor's share of a message out of the message's buffer, if it has one."""
        buffer = self._buffers[number]
        if buffer is not None:
            for low, high, start, stop in self._places[number][tensor]:
                gradient.view(-1)[start:stop].copy_(buffer[low:high])

    def _allocate(self, message: Message) -> torch.Tensor | None:
        if len(message.parts) == 1:
            return None
        owners = [self.parameters[part.tensor] for part in message.parts]
        if len({owner.dtype for owner in owners}) > 1:
            names = ", ".join(self.plan.names[part.tensor] for part in message.parts[:4])
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
