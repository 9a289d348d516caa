"""The gradients of one step on their way through the backend."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

import torch

from testbed.backends.protocol import Backend, Work
from testbed.base.types import Op, Request
from testbed.memory.planning.gradients import HELD_BYTES
from testbed.training.exchange.buckets import GradientBuckets
from testbed.training.exchange.refusals import (
    changed_gradient,
    second_gradient,
    sparse_gradient,
    unused_on_server,
)
from testbed.training.exchange.step_state import StepState

PROBE_ELEMENTS = 4096
"""Gradients of up to this size are compared with copies of themselves in the first step."""


class GradientReducer:
    """Reduces the gradients of one rank in one step, as a plan says.

    Every gradient is marked ready once; a message is submitted when its last gradient is. A ring
    matches requests by position, so the messages of a channel are submitted in the plan's order on
    all ranks, each as soon as it and all before it are complete; with order `priority` at once.

    A gradient that is being exchanged must not be changed. It is submitted as an alias with a
    version counter of its own, so that the gradient's counter tells whether anybody else writes to
    it. A gradient scaler writes without counting: in the first step, copies of small gradients are
    submitted, and the gradients compared with them.

    Where gradients are released (see `GradientBuckets`), the parameter's own is taken away when it
    is marked ready, so that nobody can change it.

    Args:
        buckets: where each gradient lies in each message.
        backend: opened with the plan's order and channels.
        step: the step.
        learning_rate: of this step, for servers that run the optimizer; None = gradients are
            summed.

    Attributes:
        may_defer: the optimizer may be run layer by layer in the next forward pass.
        number: of the step.
        looks_ahead: gradients stay until their messages have ended, and where they are released
            room is made for the next ones before these are made.
        held_bytes: means that have arrived may wait to be used together until they have so many;
            0: each is used at once.
        absent: tensors that this rank has not used in this step; zeros are exchanged for them.
        ready_order: tensors in the order in which their gradients became ready.
    """

    may_defer = True
    looks_ahead = False
    held_bytes = HELD_BYTES

    def __init__(
        self,
        buckets: GradientBuckets,
        backend: Backend,
        step: StepState,
        learning_rate: Callable[[], float] | None = None,
    ) -> None:
        self.number = step.number
        self.absent: set[int] = set()
        self.ready_order: list[int] = []
        self._buckets, self._plan, self._buffers = buckets, buckets.plan, buckets.open()
        self._backend = backend
        self._step = step
        self._learning_rate = learning_rate
        self._gradients: list[torch.Tensor | None] = [None] * len(buckets.parameters)
        self._accumulated: set[int] = set()
        self._marked: set[int] = set()
        self._missing = list(buckets.num_tensors)
        self._released = [0] * self._plan.num_channels
        self._works: dict[int, list[Work]] = {}
        self._versions: dict[int, tuple[torch.Tensor, int]] = {}
        self._probes: dict[int, torch.Tensor] = {}
        self._probe_elements = -1
        if step.is_first:
            sizes = [p.numel() for p in buckets.parameters if p.numel()]
            self._probe_elements = max(PROBE_ELEMENTS, min(sizes, default=0))

    def accumulate(self, tensor: int) -> None:
        """A gradient of an earlier micro-batch: more will be added to it."""
        self._accumulated.add(tensor)

    def mark_ready(self, tensor: int) -> None:
        """A gradient is final: submit the messages that it completes.

        Raises:
            UsageError: it was marked before, or it is sparse.
        """
        if tensor in self._marked:
            raise second_gradient(self._plan.names[tensor])
        self._marked.add(tensor)
        gradient = self._gradients[tensor] = self._gradient(tensor)
        self.ready_order.append(tensor)
        for number in self._buckets.messages_of[tensor]:
            self._copied("encode", number, tensor, gradient, self._buffers.put)
            self._missing[number] -= 1
            if self._missing[number] == 0 and not self._plan.after_backward:
                self._release(number)
        if self._buffers.frees(tensor):
            self._gradients[tensor] = None
        if self._step.recorder is not None:
            self._step.recorder.computing_since_s = time.perf_counter()

    def finalize_backward(self) -> None:
        """The backward pass has ended: mark the gradients that it did not make, submit the rest.

        A parameter that was used in an earlier micro-batch has that gradient; one that was not
        used counts as zero where others used it, and is `absent` here.

        Raises:
            UsageError: a gradient was changed after it was marked ready, or is absent though a
                server runs the optimizer.
        """
        self._refuse_changed()
        parameters = self._buckets.parameters
        late = [i for i in range(len(parameters)) if i not in self._marked]
        self.absent = {i for i in late if i not in self._accumulated or parameters[i].grad is None}
        if self.absent and self._learning_rate is not None:
            raise unused_on_server(self._plan.names[min(self.absent)], self.number)
        for tensor in reversed(late):
            parameter = parameters[tensor]
            if tensor in self.absent:
                parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            self.mark_ready(tensor)
        if self._plan.after_backward:
            for number in range(len(self._plan.messages)):
                self._send(number)

    def spread(self) -> None:
        """Submit the second halves, if the plan has halves, in forward order (the plan's tensors).

        Each channel runs them behind its first halves.
        """
        if self._plan.halves:
            for number in dict.fromkeys(n for each in self._buckets.messages_of for n in each):
                self._submit(number, Op.SPREAD)

    def land(self, tensor: int) -> None:
        """Wait for the messages that hold elements of a tensor."""
        for number in self._buckets.messages_of[tensor]:
            self.land_message(number)

    def has_landed(self, tensor: int) -> bool:
        """Whether none of the messages that hold elements of a tensor is under way any more."""
        return not any(number in self._works for number in self._buckets.messages_of[tensor])

    def land_all(self) -> None:
        """Wait for all messages, in the order in which they were submitted."""
        for number in list(self._works):
            self.land_message(number)

    @property
    def under_way(self) -> tuple[int, ...]:
        """Messages that were submitted and not waited for, in the order of submission."""
        return tuple(self._works)

    @property
    def live(self) -> Collection[int]:
        """See `MessageBuffers.live`."""
        return self._buffers.live

    def has_arrived(self, number: int) -> bool:
        """Whether waiting for a message that is under way takes no time."""
        return all(work.done() for work in self._works[number])

    def collect(self, tensor: int) -> torch.Tensor:
        """What the exchange has made of the tensor's gradient; its messages have landed."""
        gradient = self._gradients[tensor]
        if gradient is None:
            return self._buffers.mean(tensor)
        for number in self._buckets.messages_of[tensor]:
            self._copied("decode", number, tensor, gradient, self._buffers.take)
        return gradient

    def _copied(
        self,
        kind: str,
        number: int,
        tensor: int,
        gradient: torch.Tensor,
        copy: Callable[[int, int, torch.Tensor], None],
    ) -> None:
        """Put a tensor into a message's buffer, or take it out, and note it if there is one."""
        recorder = self._step.recorder
        if recorder is None or self._buckets.forms[number] is None:
            copy(number, tensor, gradient)
            return
        began_s = time.perf_counter()
        copy(number, tensor, gradient)
        name, ended_s = self._buckets.keys[number], time.perf_counter()
        recorder.add(kind, name, began_s, ended_s, self.number, message=number)

    def drop(self, tensor: int) -> None:
        """What was collected for the tensor has been used."""
        self._gradients[tensor] = None
        self._buffers.drop(tensor)

    def submit(self, request: Request) -> Work:
        """Submit a request that is none of the plan's messages, behind those submitted so far."""
        return self._backend.submit(request)

    def _release(self, number: int) -> None:
        """Submit a complete message, or as many of its channel's as may be submitted now."""
        if self._plan.order == "priority":
            self._send(number)
            return
        channel = self._plan.messages[number].channel
        line = self._buckets.messages_on[channel]
        at = self._released[channel]
        while at < len(line) and self._missing[line[at]] == 0:
            self._released[channel] = at = at + 1
            self._send(line[at - 1])

    def _send(self, number: int) -> None:
        if self._learning_rate is not None:
            self._submit(number, Op.APPLY, self._learning_rate())
        else:
            self._submit(number, Op.FOLD if self._plan.halves else Op.ALL_REDUCE)

    def _submit(self, number: int, op: Op, learning_rate: float = 0.0) -> None:
        message = self._plan.messages[number]
        request = Request(
            op,
            self._buffers.payload(number, self._gradients),
            key=self._buckets.keys[number],
            step=self.number,
            priority=message.priority,
            channel=message.channel,
            learning_rate=learning_rate,
        )
        self._works.setdefault(number, []).append(self._backend.submit(request))

    def land_message(self, number: int) -> None:
        """Wait for a message, if it is under way."""
        for work in self._works.pop(number, ()):
            self._step.wait(work, self._buckets.keys[number])

    def _gradient(self, tensor: int) -> torch.Tensor:
        """The parameter's gradient, contiguous, as an alias that the exchange may overwrite."""
        parameter = self._buckets.parameters[tensor]
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            raise sparse_gradient(self._plan.names[tensor])
        if not gradient.is_contiguous():
            gradient = parameter.grad = gradient.contiguous()
        if self._buckets.release is not None:
            parameter.grad = None
            return gradient.data
        self._versions[tensor] = (gradient, gradient._version)
        alias = gradient.data
        if alias.numel() <= self._probe_elements:
            self._probes[tensor] = alias.clone()
            return alias.clone()
        return alias

    def _refuse_changed(self) -> None:
        for tensor, (gradient, version) in self._versions.items():
            replaced = self._buckets.parameters[tensor].grad is not gradient
            if replaced or gradient._version != version:
                raise changed_gradient(self._plan.names[tensor])
        for tensor, before in self._probes.items():
            gradient, _ = self._versions[tensor]
            # As bytes: NaN is no change.
            if not torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (gradient.data, before))):
                raise changed_gradient(self._plan.names[tensor])
        self._probes.clear()
