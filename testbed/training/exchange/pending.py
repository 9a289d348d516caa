"""A step whose update is still to be taken: each layer takes its share before it is read again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from testbed.training.exchange.deferred import DeferredStep
from testbed.training.exchange.flight import Flight, Wait
from testbed.training.exchange.means import divide, norms_of, refuse_non_finite, silent


class PendingUpdate:
    """The parameters of one step that have not been updated yet.

    Args:
        flight: brings the sums (or, from servers that run the optimizer, the parameters).
        parameters: in the plan's order.
        names: theirs.
        step: its number.
        optimizer: takes the step, with the settings that it has now; None = servers have taken it.
        divisor: number of workers that a mean is over.
        unused: tells which tensors no rank used in this step; asked once, and only when a mean is
            zero everywhere.
        check_finite: report NaN and infinity.
    """

    def __init__(
        self,
        flight: Flight,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        step: int,
        *,
        optimizer: torch.optim.Optimizer | None,
        divisor: int,
        unused: Callable[[], set[int]],
        check_finite: bool,
    ) -> None:
        self.left = dict.fromkeys(range(len(parameters)))
        self.stepping = False
        self._flight = flight
        self._parameters = parameters
        self._names = names
        self._step = step
        self._deferred = None if optimizer is None else DeferredStep(optimizer)
        self._divisor = divisor
        self._ask_unused = unused
        self._unused: set[int] | None = None
        self._check_finite = check_finite

    def take(self, tensors: Sequence[int], wait: Wait) -> None:
        """Update those of these tensors that are left, once their messages have ended.

        Raises:
            NonFiniteGradient: a mean (or a parameter from a server) holds NaN or infinity.
        """
        chosen = [tensor for tensor in tensors if tensor in self.left]
        if not chosen:
            return
        for tensor in chosen:
            del self.left[tensor]
            for number in self._flight.messages_of(tensor):
                self._flight.land(number, wait)
        arrived = [self._flight.collect(tensor) for tensor in chosen]
        if self._deferred is None:
            self._replace(chosen, arrived)
        else:
            self._update(chosen, arrived, self._deferred)

    def _replace(self, tensors: Sequence[int], values: Sequence[torch.Tensor]) -> None:
        if self._check_finite:
            self._refuse_non_finite(tensors, values, norms_of(values), "parameter")
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                self._parameters[tensor].copy_(value)

    def _update(
        self, tensors: Sequence[int], sums: Sequence[torch.Tensor], deferred: DeferredStep
    ) -> None:
        divide(sums, self._divisor)
        norms = norms_of(sums)
        if self._check_finite:
            self._refuse_non_finite(tensors, sums, norms, "gradient")
        unused = self._unused_of(tensors, silent(sums, norms))
        means = [None if t in unused else g for t, g in zip(tensors, sums, strict=True)]
        self.stepping = True
        try:
            deferred.take([self._parameters[t] for t in tensors], means)
        finally:
            self.stepping = False

    def _unused_of(self, tensors: Sequence[int], zeros: Sequence[int]) -> set[int]:
        """Those that no rank used: their means are zero, but so may others be."""
        doubtful = [tensors[position] for position in zeros]
        if not doubtful:
            return set()
        if self._unused is None:
            self._unused = self._ask_unused()
        return self._unused.intersection(doubtful)

    def _refuse_non_finite(
        self,
        tensors: Sequence[int],
        values: Sequence[torch.Tensor],
        norms: Sequence[float],
        what: str,
    ) -> None:
        names = [self._names[tensor] for tensor in tensors]
        refuse_non_finite(names, values, norms, self._step, what)
