"""One step's messages: what is ready, what has left, what has arrived."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from testbed.backends.protocol import Backend, Work
from testbed.nouns import Combined, Request, Verb
from testbed.scheduling.plan import Plan
from testbed.training.exchange.fusion import Fusion
from testbed.training.exchange.release import InOrderRelease

Wait = Callable[[Work, str], Combined]
"""Waits for an exchange; given its message's name, for words."""


class Flight:
    """Carries out a plan for one step, on one rank.

    Args:
        plan: what travels together, and in which order.
        fusion: where each gradient lies in each message.
        keys: name of each message, equal on all ranks.
        backend: opened with the plan's order and channels.
        step: number of the step.
        learning_rate: of this step, for servers that run the optimizer; None = they do not.
    """

    def __init__(
        self,
        plan: Plan,
        fusion: Fusion,
        keys: Sequence[str],
        backend: Backend,
        step: int,
        learning_rate: Callable[[], float] | None,
    ) -> None:
        self.ready_order: list[int] = []
        self._works: dict[int, list[Work]] = {}
        self._landed: set[int] = set()
        self._gradients: list[torch.Tensor | None] = [None] * len(plan.names)
        self._plan = plan
        self._fusion = fusion
        self._keys = keys
        self._backend = backend
        self._step = step
        self._learning_rate = learning_rate
        self._release = [
            InOrderRelease([n for n, m in enumerate(plan.messages) if m.channel == channel])
            for channel in range(plan.num_channels)
        ]
        self._missing = [len({p.tensor for p in m.parts}) for m in plan.messages]

    def has(self, tensor: int) -> bool:
        """Whether the tensor's gradient was given."""
        return self._gradients[tensor] is not None

    def give(self, tensor: int, gradient: torch.Tensor) -> None:
        """A gradient is ready; whatever may leave now leaves."""
        self._gradients[tensor] = gradient
        self.ready_order.append(tensor)
        for number in self._fusion.messages_of[tensor]:
            self._fusion.put(number, tensor, gradient)
            self._missing[number] -= 1
            if self._missing[number] == 0 and not self._plan.after_backward:
                self._offer(number)

    def end_backward(self) -> None:
        """All gradients were given: send what waited for that."""
        if self._plan.after_backward:
            for number in range(len(self._plan.messages)):
                self._send(number)

    def spread(self) -> None:
        """Start the second halves, all at once, in forward order (the plan's order of tensors).

        Each channel carries them back to back behind its first halves.
        """
        begun: set[int] = set()
        for messages in self._fusion.messages_of:
            for number in messages:
                if number not in begun:
                    begun.add(number)
                    self._submit(number, Verb.SPREAD)

    def land(self, number: int, wait: Wait) -> None:
        """Wait until a message (both its halves, if it has two) has ended; once is enough."""
        if number in self._landed:
            return
        for work in self._works[number]:
            wait(work, self._keys[number])
        self._landed.add(number)

    def land_all(self, wait: Wait) -> None:
        """Wait for all messages, in the order in which they left."""
        for number in self._works:
            self.land(number, wait)

    def collect(self, tensor: int) -> torch.Tensor:
        """The tensor's gradient after the exchange; its messages must have landed."""
        gradient = self._gradients[tensor]
        assert gradient is not None
        for number in self._fusion.messages_of[tensor]:
            self._fusion.take(number, tensor, gradient)
        return gradient

    def messages_of(self, tensor: int) -> list[int]:
        """The messages that carry parts of a tensor."""
        return self._fusion.messages_of[tensor]

    def _offer(self, number: int) -> None:
        if self._plan.order == "priority":
            self._send(number)
            return
        for released in self._release[self._plan.messages[number].channel].ready(number):
            self._send(released)

    def _send(self, number: int) -> None:
        if self._learning_rate is not None:
            verb = Verb.APPLY
        else:
            verb = Verb.FOLD if self._plan.halves else Verb.SUM
        self._submit(number, verb)

    def _submit(self, number: int, verb: Verb) -> None:
        message = self._plan.messages[number]
        request = Request(
            verb,
            self._fusion.payload(number, self._gradients),
            key=self._keys[number],
            step=self._step,
            priority=message.priority,
            channel=message.channel,
            learning_rate=self._learning_rate() if self._learning_rate is not None else 0.0,
        )
        self._works.setdefault(number, []).append(self._backend.submit(request))
