"""What one rank gives to a step: gradients as its backward passes make them, zeros for the rest."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from testbed.training.flight import Flight
from testbed.training.refusals import second_gradient, sparse_gradient


class Contribution:
    """The gradients of one rank in one step.

    Args:
        flight: takes each gradient as soon as it is final.
        parameters: in the plan's order; their `.grad` is looked at.
        names: theirs.
    """

    def __init__(
        self, flight: Flight, parameters: Sequence[torch.Tensor], names: Sequence[str]
    ) -> None:
        self.flight = flight
        self.absent: set[int] = set()
        self.ready_order: tuple[int, ...] = ()
        self._parameters = parameters
        self._names = names
        self._kept: set[int] = set()

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
        """
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
        return gradient
