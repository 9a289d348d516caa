"""What one rank gives to a step: gradients as its backward passes make them, zeros for the rest."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from testbed.training.exchange.flight import Flight
from testbed.training.exchange.refusals import changed_gradient, second_gradient, sparse_gradient

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
        flight: Flight,
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
