"""Between gradients and messages: which elements of which gradient lie where in which message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import torch

from testbed.base.errors import UsageError
from testbed.base.plan import Message, Plan
from testbed.memory.running.arena import Arena, is_bounded, place_buckets
from testbed.memory.strategy import Release


class GradientBuckets:
    """The messages of a plan as tensors.

    A message that is a whole gradient, or one slice of it, is a view: nothing is copied. A fused
    message (a bucket) has a buffer; gradients are copied in as they become ready and copied out
    when the result has arrived. Buffers are allocated once, or, where gradients are released, each
    for the time from its first gradient to its last update.

    Args:
        plan: its tensors are those of `parameters`, in the same order.
        parameters: shapes, dtype and device of the gradients.
        release: gradients are freed once they are in a buffer, and so are buffers; None: all stay.
        travels: False where nothing is exchanged, so that released buffers are not needed at all.

    Attributes:
        keys: name of each message, unique, equal on all ranks.
        num_tensors: for each message, of how many tensors it holds elements.
        messages_of: for each tensor, the messages that hold elements of it.
        messages_on: for each channel, its messages in the plan's order.
        places: for each message and tensor: (first in the message, end, first in the tensor, end).
        release: as given.
        arena: what released buffers are taken out of.
        held_bytes: of buffers at most, as planned.

    Raises:
        UsageError: a message mixes dtypes.
    """

    def __init__(
        self,
        plan: Plan,
        parameters: Sequence[torch.nn.Parameter],
        release: Release | None = None,
        *,
        travels: bool = True,
    ) -> None:
        self.plan, self.parameters, self.release = plan, parameters, release
        self.keys = describe_messages(plan)
        self.places: list[dict[int, list[tuple[int, int, int, int]]]] = []
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
            self.places.append(places)
        self.messages_on = [
            [number for number, message in enumerate(plan.messages) if message.channel == channel]
            for channel in range(plan.num_channels)
        ]
        self.num_tensors = [len(places) for places in self.places]
        self.forms = [self._form(message) for message in plan.messages]
        device = parameters[0].device if parameters else torch.device("cpu")
        self.held_bytes = sum(n * dtype.itemsize for n, dtype in filter(None, self.forms))
        self.offsets: tuple[int | None, ...] = (None,) * len(plan.messages)
        self._kept = MessageBuffers(self) if release is None else None
        if release is None or not travels or not is_bounded(plan):
            self.arena = Arena(0, device, poisons=release is not None and release.poisons)
        else:
            placed = place_buckets(plan, release.in_flight)
            self.arena = Arena(placed.num_bytes, device, poisons=release.poisons)
            self.held_bytes, self.offsets = placed.num_bytes, placed.offsets
        if release is not None and not travels:
            self.held_bytes = 0

    def open(self) -> MessageBuffers:
        """The buffers of one step."""
        return self._kept or ReleasedBuffers(self)

    def held_tensors(self) -> list[torch.Tensor]:
        """What is held for fused messages between steps."""
        return self.arena.tensors() if self._kept is None else self._kept.tensors()

    def allocate(self, number: int) -> torch.Tensor | None:
        """A buffer for as long as the session lives; None: the message needs none."""
        form = self.forms[number]
        if form is None:
            return None
        return torch.zeros(form[0], dtype=form[1], device=self.parameters[0].device)

    def _form(self, message: Message) -> tuple[int, torch.dtype] | None:
        """Number of elements and dtype of a buffer; None: the message needs none."""
        if len(message.parts) == 1:
            return None
        owners = [self.parameters[part.tensor] for part in message.parts]
        if len({owner.dtype for owner in owners}) > 1:
            names = ", ".join(self.plan.names[part.tensor] for part in message.parts[:4])
            raise UsageError(
                f"the plan fuses tensors of different dtypes ({names}, ...) into one message; plan "
                "each dtype by itself"
            )
        return sum(part.stop - part.start for part in message.parts), owners[0].dtype


class MessageBuffers:
    """The memory of fused messages, which stays from step to step.

    Args:
        buckets: the messages.
    """

    def __init__(self, buckets: GradientBuckets) -> None:
        self._buckets = buckets
        self._buffers = [buckets.allocate(number) for number in range(len(buckets.forms))]

    def tensors(self) -> list[torch.Tensor]:
        """The buffers that are there now."""
        return [buffer for buffer in self._buffers if buffer is not None]

    def put(self, number: int, tensor: int, gradient: torch.Tensor) -> None:
        """Copy the tensor's share of a message into the message's buffer, if it has one."""
        buffer = self._buffers[number]
        if buffer is not None:
            for low, high, start, stop in self._buckets.places[number][tensor]:
                buffer[low:high].copy_(gradient.view(-1)[start:stop])

    def payload(self, number: int, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """The tensor to be exchanged for a message whose gradients are all ready."""
        buffer = self._buffers[number]
        if buffer is not None:
            return buffer
        (part,) = self._buckets.plan.messages[number].parts
        gradient = gradients[part.tensor]
        assert gradient is not None
        whole = part.start == 0 and part.stop == gradient.numel()
        return gradient if whole else gradient.view(-1)[part.start : part.stop]

    def take(self, number: int, tensor: int, gradient: torch.Tensor) -> None:
        """Copy the tensor's share of a message out of the message's buffer, if it has one."""
        buffer = self._buffers[number]
        if buffer is not None:
            for low, high, start, stop in self._buckets.places[number][tensor]:
                gradient.view(-1)[start:stop].copy_(buffer[low:high])

    def frees(self, tensor: int) -> bool:
        """Whether the gradient itself is needed no more once it has been put."""
        return False

    def mean(self, tensor: int) -> torch.Tensor:
        """What has arrived for a tensor whose gradient was freed; valid until it is dropped."""
        parameter = self._buckets.parameters[tensor]
        numbers = self._buckets.messages_of[tensor]
        buffer, places = self._buffers[numbers[0]], self._buckets.places[numbers[0]][tensor]
        if len(numbers) == len(places) == 1 and buffer is not None:
            low, high, _, _ = places[0]
            return buffer[low:high].view(parameter.shape)
        together = torch.empty_like(parameter, memory_format=torch.contiguous_format)
        for number in numbers:
            self.take(number, tensor, together)
        return together.detach()

    def drop(self, tensor: int) -> None:
        """The tensor's mean has been used."""

    @property
    def live(self) -> Collection[int]:
        """Messages that have begun and of which something has not been used yet, where counted."""
        return ()


class ReleasedBuffers(MessageBuffers):
    """See `MessageBuffers`: those of one step, each from its first gradient to its last update.

    Args:
        buckets: the messages.
    """

    def __init__(self, buckets: GradientBuckets) -> None:
        self._buckets = buckets
        self._buffers = [None] * len(buckets.forms)
        self._left: dict[int, int] = {}  # by live message: tensors that have not been dropped

    def put(self, number: int, tensor: int, gradient: torch.Tensor) -> None:
        """See `MessageBuffers.put`."""
        form = self._buckets.forms[number]
        if number not in self._left:
            self._left[number] = self._buckets.num_tensors[number]
            if form is not None:
                arena, at = self._buckets.arena, self._buckets.offsets[number]
                self._buffers[number] = arena.take(*form, at)
        super().put(number, tensor, gradient)

    def frees(self, tensor: int) -> bool:
        """See `MessageBuffers.frees`."""
        return all(self._buckets.forms[n] is not None for n in self._buckets.messages_of[tensor])

    def drop(self, tensor: int) -> None:
        """See `MessageBuffers.drop`; a message goes with its last tensor."""
        for number in self._buckets.messages_of[tensor]:
            self._left[number] -= 1
            if self._left[number]:
                continue
            del self._left[number]
            buffer, self._buffers[number] = self._buffers[number], None
            if buffer is not None:
                self._buckets.arena.give_back(buffer)

    @property
    def live(self) -> Collection[int]:
        """See `MessageBuffers.live`."""
        return self._left.keys()


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
