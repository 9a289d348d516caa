"""A step whose update is still to be taken: each layer takes its share before it is read again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from testbed.base.errors import NonFiniteGradient
from testbed.training.exchange.reducer import GradientReducer, Wait

# The optimizer's step in portions: each layer is updated when its own gradients have arrived.


class DeferredStep:
    """One step of any torch optimizer, taken for some parameters at a time.

    A torch optimizer keeps its state by parameter and skips parameters that it is not given, so
    that a step over all equals steps over disjoint portions, with the parameter groups and their
    settings (learning rate, momentum, ...) that held when the step was asked for.

    Args:
        optimizer: asked to step now.
        gradients: of the parameters that take part; emptied from the parameters by the caller.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._settings: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (group, {key: _frozen(value) for key, value in group.items() if key != "params"})
            for group in optimizer.param_groups
        ]

    def take(
        self, parameters: Sequence[torch.nn.Parameter], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Update these parameters alone; those without a gradient are left as they are."""
        chosen = {id(parameter) for parameter in parameters}
        groups = self._optimizer.param_groups
        kept = [dict(group) for group in groups]
        own = [parameter.grad for parameter in parameters]
        try:
            for group in groups:
                settings = next((s for g, s in self._settings if g is group), None)
                # A group that was added since then has no part in this step.
                mine = [] if settings is None else [p for p in group["params"] if id(p) in chosen]
                group.update(settings or {}, params=mine)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            type(self._optimizer).step(self._optimizer)
        finally:
            for group, before in zip(groups, kept, strict=True):
                group.update(before)
            for parameter, gradient in zip(parameters, own, strict=True):
                parameter.grad = gradient


def _frozen(value: Any) -> Any:
    """The setting as it is now: a schedule changes a learning rate that is a tensor in place."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, list | tuple):
        return type(value)(_frozen(item) for item in value)
    return value


# From sums to means, and what is wrong with a mean.


def divide(sums: Sequence[torch.Tensor], num_workers: int) -> None:
    """Turn sums over the workers into means, in place."""
    if num_workers > 1 and sums:
        torch._foreach_div_(list(sums), float(num_workers))


def norms_of(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Euclidean norms, in one pass over the memory; waits once for each device, not each tensor.

    Example:
        >>> norms_of([torch.tensor([3.0, 4.0]), torch.zeros(2), torch.empty(0)])
        [5.0, 0.0, 0.0]
    """
    norms = torch._foreach_norm(list(tensors)) if tensors else ()
    by_device: dict[torch.device, list[int]] = {}
    for position, norm in enumerate(norms):
        by_device.setdefault(norm.device, []).append(position)
    found = [0.0] * len(tensors)
    for positions in by_device.values():
        together = torch.stack([norms[position] for position in positions])
        for position, value in zip(positions, together.tolist(), strict=True):
            found[position] = value
    return found


def all_zero(tensors: Sequence[torch.Tensor], norms: Sequence[float]) -> list[int]:
    """Positions of tensors that are zero everywhere (and have elements at all).

    Args:
        tensors: to look at.
        norms: of each, from `norms_of`.
    """
    pairs = zip(tensors, norms, strict=True)
    return [i for i, (tensor, norm) in enumerate(pairs) if tensor.numel() and norm == 0.0]


def refuse_non_finite(
    names: Sequence[str],
    tensors: Sequence[torch.Tensor],
    norms: Sequence[float],
    step: int,
    what: str = "gradient",
) -> None:
    """Look for NaN and infinity.

    A norm is finite only if all elements are; only where it is not are the elements looked at (a
    norm of finite numbers may overflow).

    Args:
        names: of the tensors.
        tensors: to look at.
        norms: of each, from `norms_of`.
        step: for the message, as is `what`.
        what: the tensors are.

    Raises:
        NonFiniteGradient: names the tensor and the step.
    """
    for name, tensor, norm in zip(names, tensors, norms, strict=True):
        if math.isfinite(norm) or bool(torch.isfinite(tensor).all()):
            continue
        bad = "NaN" if bool(torch.isnan(tensor).any()) else "infinite values"
        raise NonFiniteGradient(
            f"{what} of {name!r} has {bad} after the exchange of step {step}; expected finite "
            "numbers; lower the learning rate or clip with --clip-norm"
        )


class DeferredUpdate:
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
        flight: GradientReducer,
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
        unused = self._unused_of(tensors, all_zero(sums, norms))
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
