"""One step's messages: what is ready, what has left, what has arrived."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from testbed.backends.protocol import Backend, Work
from testbed.base.plan import Plan
from testbed.base.types import Op, Request, Result
from testbed.training.exchange.buckets import GradientBuckets
from testbed.training.exchange.refusals import changed_gradient, second_gradient, sparse_gradient

# In which order gradients leave: the same on every rank, whatever order they become ready in.
#
# A ring matches messages by position, so a rank must not send what the others do not expect. The
# gradients therefore leave in one agreed order; each as soon as it and all before it are ready.


class InOrderRelease:
    """Releases items in a fixed order.

    Example:
        >>> release = InOrderRelease([5, 3, 4])
        >>> release.ready(3), release.ready(5), release.ready(4)
        ([], [5, 3], [4])
    """

    def __init__(self, order: Sequence[int]) -> None:
        self._order = tuple(order)
        self._ready: set[int] = set()
        self._next = 0

    def ready(self, item: int) -> list[int]:
        """The item is ready; returns what may leave now, in order.

        Raises:
            ValueError: the item was ready before.
        """
        if item in self._ready:
            raise ValueError(f"item {item} is ready for the second time")
        self._ready.add(item)
        start = self._next
        while self._next < len(self._order) and self._order[self._next] in self._ready:
            self._next += 1
        return list(self._order[start : self._next])


Wait = Callable[[Work, str], Result]
"""Waits for an exchange; given its message's name, for words."""


class GradientReducer:
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
        fusion: GradientBuckets,
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
                    self._submit(number, Op.SPREAD)

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
            op = Op.APPLY
        else:
            op = Op.FOLD if self._plan.halves else Op.ALL_REDUCE
        self._submit(number, op)

    def _submit(self, number: int, op: Op) -> None:
        message = self._plan.messages[number]
        request = Request(
            op,
            self._fusion.payload(number, self._gradients),
            key=self._keys[number],
            step=self._step,
            priority=message.priority,
            channel=message.channel,
            learning_rate=self._learning_rate() if self._learning_rate is not None else 0.0,
        )
        self._works.setdefault(number, []).append(self._backend.submit(request))


# What one rank gives to a step: gradients as its backward passes make them, zeros for the rest.

PROBE_ELEMENTS = 4096
"""Gradients up to this size are compared with themselves in the first step."""


class Contribution:
    """The gradients of one rank in one step.

    A gradient that was given belongs to the exchange. It travels as an alias with a version of its
    own, so that the gradient's version tells whether anybody else writes to it. A gradient scaler
    does so without a new version: `probing` finds it by value.

    Args:
        flight: takes each gradient as soon as it is final.
        parameters: in the plan's order; their `.grad` is looked at.
        names: theirs.
        probing: let copies of small gradients travel, and look whether the gradients stay as they
            are; for one step, as a loop that changes them does so in each.
    """

    def __init__(
        self,
        flight: GradientReducer,
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        probing: bool = False,
    ) -> None:
        self.flight = flight
        self.absent: set[int] = set()
        self.ready_order: tuple[int, ...] = ()
        self._parameters = parameters
        self._names = names
        self._kept: set[int] = set()
        self._given: dict[int, tuple[torch.Tensor, int]] = {}
        self._probes: dict[int, torch.Tensor] = {}
        sizes = [p.numel() for p in parameters if p.numel()]
        self._probe_elements = max(PROBE_ELEMENTS, min(sizes, default=0)) if probing else -1

    def keep(self, tensor: int) -> None:
        """A gradient of an earlier micro-batch: more is to be added to it."""
        self._kept.add(tensor)

    def give(self, tensor: int) -> None:
        """The gradient is final.

        Raises:
            UsageError: it was given before, or it is sparse.
        """
        if self.flight.has(tensor):
            raise second_gradient(self._names[tensor])
        self.flight.give(tensor, self._gradient(tensor))

    def complete(self) -> None:
        """Backward has ended: give what did not come in its last pass.

        A parameter that was used in an earlier micro-batch gives that gradient; one that was not
        used counts as zero where others used it, and is `absent` here.

        Raises:
            UsageError: a gradient was changed after it was given.
        """
        self._refuse_changed()
        observed = list(self.flight.ready_order)
        late = [i for i in range(len(self._parameters)) if not self.flight.has(i)]
        for tensor in reversed(late):
            parameter = self._parameters[tensor]
            if tensor not in self._kept or parameter.grad is None:
                self.absent.add(tensor)
                parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            self.flight.give(tensor, self._gradient(tensor))
        self.flight.end_backward()
        self.ready_order = (*observed, *reversed(late))

    def _gradient(self, tensor: int) -> torch.Tensor:
        """The parameter's gradient, laid out so that it can travel as it is."""
        parameter = self._parameters[tensor]
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            raise sparse_gradient(self._names[tensor])
        if not gradient.is_contiguous():
            gradient = parameter.grad = gradient.contiguous()
        self._given[tensor] = (gradient, gradient._version)
        alias = gradient.data
        if gradient.numel() <= self._probe_elements:
            self._probes[tensor] = alias.clone()
            return alias.clone()
        return alias

    def _refuse_changed(self) -> None:
        for tensor, (gradient, version) in self._given.items():
            replaced = self._parameters[tensor].grad is not gradient
            if replaced or gradient._version != version:
                raise changed_gradient(self._names[tensor])
        for tensor, before in self._probes.items():
            gradient, _ = self._given[tensor]
            # As bytes: NaN is no change.
            if not torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (gradient.data, before))):
                raise changed_gradient(self._names[tensor])
        self._probes.clear()
