"""One step's messages: what is ready, what has left, what has arrived."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from testbed.backends.protocol import Backend, Work
from testbed.nouns import Request, Verb
from testbed.scheduling.plan import Plan
from testbed.training.fusion import Fusion
from testbed.training.release import InOrderRelease


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
        self.works: dict[int, Work] = {}
        self._folds: dict[int, Work] = {}
        self.gradients: list[torch.Tensor | None] = [None] * len(plan.names)
        self.ready_order: list[int] = []
        self._plan = plan
        self._fusion = fusion
        self._keys = keys
        self._backend = backend
        self._step = step
        self._learning_rate = learning_rate
        self._release = InOrderRelease(range(len(plan.messages)))
        self._missing = [len({p.tensor for p in m.parts}) for m in plan.messages]

    def has(self, tensor: int) -> bool:
        """Whether the tensor's gradient was given."""
        return self.gradients[tensor] is not None

    def give(self, tensor: int, gradient: torch.Tensor) -> None:
        """A gradient is ready; whatever may leave now leaves."""
        self.gradients[tensor] = gradient
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

    def spread(self, forward_order: Sequence[int]) -> None:
        """Start the second halves, those of the first layers first."""
        self._folds, self.works = self.works, {}
        for tensor in forward_order:
            for number in self._fusion.messages_of[tensor]:
                if number not in self.works:
                    self.works[number] = self._backend.submit(self._request(number, Verb.SPREAD))

    def works_of(self, number: int) -> list[Work]:
        """All exchanges of a message: one, or its two halves."""
        fold = self._folds.get(number)
        return [*([] if fold is None else [fold]), self.works[number]]

    def collect(self, tensor: int) -> torch.Tensor:
        """The tensor's gradient after the exchange; its messages must have ended."""
        gradient = self.gradients[tensor]
        assert gradient is not None
        for number in self._fusion.messages_of[tensor]:
            self._fusion.take(number, tensor, gradient)
        return gradient

    def key(self, number: int) -> str:
        """A message's name."""
        return self._keys[number]

    def messages_of(self, tensor: int) -> list[int]:
        """The messages that carry parts of a tensor."""
        return self._fusion.messages_of[tensor]

    def _offer(self, number: int) -> None:
        if self._plan.order == "priority":
            self._send(number)
            return
        for released in self._release.ready(number):
            self._send(released)

    def _send(self, number: int) -> None:
        verb = Verb.FOLD if self._plan.halves else Verb.SUM
        self.works[number] = self._backend.submit(
            self._request(number, Verb.APPLY if self._learning_rate is not None else verb)
        )

    def _request(self, number: int, verb: Verb) -> Request:
        message = self._plan.messages[number]
        return Request(
            verb,
            self._fusion.payload(number, self.gradients),
            key=self._keys[number],
            step=self._step,
            priority=message.priority,
            channel=message.channel,
            learning_rate=self._learning_rate() if self._learning_rate is not None else 0.0,
        )
