"""A step's messages where a compressor carries them: the same plan, conversations instead of sums.

Plans in two halves: the whole conversation runs where the first half would, and is waited for where
the second half would be, just before the layer's next forward. Compressed messages are not cut into
halves: a gathered payload has no shard to fold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from testbed.backends.protocol import Backend
from testbed.scheduling.plan import Message, Plan
from testbed.training.compressed.conversations import Conversations
from testbed.training.compressed.helper import made_on
from testbed.training.compressed.talk import Outgoing
from testbed.training.exchange.flight import Flight
from testbed.training.exchange.fusion import Fusion

Shapes = tuple[tuple[int, ...], ...]


class CompressedFlight(Flight):
    """See `Flight`; what is collected are means, not sums.

    Args:
        plan: see `Flight`, as are `fusion`, `keys`, `backend` and `step`.
        conversations: carry the messages.
        shapes: of the tensors in each message, see `shapes_of`.
        rate: the step's learning rate, None = there is no single one.
        keeps: copies of what this rank gave, by message; None = nobody will ask.
    """

    def __init__(
        self,
        plan: Plan,
        fusion: Fusion,
        keys: Sequence[str],
        backend: Backend,
        step: int,
        *,
        conversations: Conversations,
        shapes: Sequence[Shapes],
        rate: Callable[[], float | None],
        keeps: dict[int, torch.Tensor] | None,
    ) -> None:
        super().__init__(plan, fusion, keys, backend, step, None)
        self._conversations = conversations
        self._shapes = shapes
        self._rate = rate
        self.kept = keeps

    def spread(self) -> None:
        """Nothing: the first half was the whole."""

    def delivered(self, number: int) -> torch.Tensor:
        """The mean of a message that has landed."""
        return self._fusion.payload(number, self._gradients).view(-1)

    def _send(self, number: int) -> None:
        message = self._plan.messages[number]
        values = self._fusion.payload(number, self._gradients).view(-1)
        if self.kept is not None:
            self.kept[number] = values.clone()
        outgoing = Outgoing(
            values,
            self._conversations.context(
                self._keys[number], self._step, self._shapes[number], self._rate()
            ),
            message.priority,
            message.channel,
            made_on(values.device),
        )
        self._works.setdefault(number, []).append(self._conversations.begin(outgoing))


def shapes_of(plan: Plan, parameters: Sequence[torch.Tensor]) -> list[Shapes]:
    """For each message the shapes of its parts: a whole tensor's own, a slice has one dimension.

    Example:
        >>> from testbed.scheduling.plan import Part
        >>> plan = Plan(scheduler="x", names=("a",), num_elements=(6,), dtypes=("float32",),
        ...             messages=(Message(parts=(Part(0, 0, 6),)), Message(parts=(Part(0, 0, 4),))))
        >>> shapes_of(plan, [torch.zeros(2, 3)])
        [((2, 3),), ((4,),)]
    """
    return [_shapes(message, parameters) for message in plan.messages]


def _shapes(message: Message, parameters: Sequence[torch.Tensor]) -> Shapes:
    found = []
    for part in message.parts:
        parameter, length = parameters[part.tensor], part.stop - part.start
        whole = length == parameter.numel() and parameter.dim() > 0
        found.append(tuple(parameter.shape) if whole else (length,))
    return tuple(found)
