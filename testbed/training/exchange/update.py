"""The end of a step: what the optimizer is given, at once or layer by layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from typing import Protocol

import torch

from testbed.backends.protocol import Backend
from testbed.base.errors import NonFiniteGradient
from testbed.base.types import Op
from testbed.memory.planning.gradients import SLICE_ELEMENTS
from testbed.training.exchange.buckets import GradientBuckets
from testbed.training.exchange.reducer import GradientReducer
from testbed.training.exchange.refusals import halves_refused, never_exchanged
from testbed.training.exchange.setup import install
from testbed.training.exchange.step import DeferredStep
from testbed.training.exchange.step_state import StepState

Unused = Callable[[Sequence[int]], Collection[int]]
"""Those of the given tensors that no rank has used in the step."""

Gradients = dict[int, torch.Tensor | None]
"""By tensor, the gradient for the optimizer; None = it is to leave the parameter alone."""


class Delivery(Protocol):
    """What becomes of a step's gradients; chosen once, when a session is made.

    Attributes:
        exchanges: whether gradients leave this rank.
        may_replan: whether another plan may be adopted after the first step.
    """

    exchanges: bool
    may_replan: bool

    def adopt(self, buckets: GradientBuckets) -> None:
        """Carry out another plan from now on.

        Raises:
            UsageError: a plan in halves, where they are not possible.
        """
        ...

    def reducer(self, step: StepState) -> GradientReducer:
        """What takes the gradients of this step."""
        ...

    def deliver(self, values: Mapping[int, torch.Tensor], step: int, unused: Unused) -> Gradients:
        """What the optimizer is to use.

        Args:
            values: by tensor, what the exchange has brought; this rank's gradients without one.
            step: number of the step.
            unused: asked once at most, about means that are zero everywhere.

        Raises:
            NonFiniteGradient: a value holds NaN or infinity; no parameter has been changed.
        """
        ...


class MeanGradients:
    """Sums over the workers become means; each worker runs the optimizer.

    Args:
        backend: opened.
        divisor: number of workers that a mean is over.
        check_finite: report NaN and infinity.
    """

    exchanges = True
    may_replan = True

    def __init__(self, backend: Backend, divisor: int, check_finite: bool) -> None:
        self._backend = backend
        self._divisor = divisor
        self._check_finite = check_finite
        self._buckets: GradientBuckets

    def adopt(self, buckets: GradientBuckets) -> None:
        """See `Delivery.adopt`."""
        if buckets.plan.halves and not self._backend.capabilities.ops >= {Op.FOLD, Op.SPREAD}:
            raise halves_refused(buckets.plan.scheduler)
        self._buckets = buckets

    def reducer(self, step: StepState) -> GradientReducer:
        """See `Delivery.reducer`."""
        return GradientReducer(self._buckets, self._backend, step)

    def deliver(self, values: Mapping[int, torch.Tensor], step: int, unused: Unused) -> Gradients:
        """See `Delivery.deliver`; divides in place."""
        tensors, sums = list(values), [_held(value) for value in values.values()]
        divide(sums, self._divisor)
        norms = norms_of(sums)
        self._refuse_non_finite(values, step, norms=norms)
        # A mean that is zero everywhere may be that of a parameter that no rank has used.
        doubtful = [tensors[place] for place in all_zero(list(values.values()), norms)]
        return {**values, **dict.fromkeys(unused(doubtful) if doubtful else ())}

    def _refuse_non_finite(
        self,
        values: Mapping[int, torch.Tensor],
        step: int,
        what: str = "gradient",
        norms: Sequence[float] | None = None,
    ) -> None:
        if self._check_finite:
            names = [self._buckets.plan.names[t] for t in values]
            tensors = [_held(value) for value in values.values()]
            norms = norms_of(tensors) if norms is None else norms
            refuse_non_finite(names, tensors, norms, step, what)


class OwnGradients(MeanGradients):
    """A worker that is alone: its gradients are the means, and nothing is exchanged."""

    exchanges = False

    def deliver(self, values: Mapping[int, torch.Tensor], step: int, unused: Unused) -> Gradients:
        """See `Delivery.deliver`."""
        self._refuse_non_finite(values, step)
        return dict(values)


class ServerParameters(MeanGradients):
    """Servers run the optimizer; updated parameters come back, and nothing is left to do here.

    Args:
        backend: opened, with servers that run optimizers (`Op.APPLY`).
        optimizer: in words that the servers understand.
        learning_rate: of the step that is being computed.
        check_finite: report NaN and infinity.
    """

    may_replan = False  # servers hold the parameters as the plan's messages

    def __init__(
        self,
        backend: Backend,
        optimizer: str,
        learning_rate: Callable[[], float],
        check_finite: bool,
    ) -> None:
        super().__init__(backend, 1, check_finite)
        self._optimizer = optimizer
        self._learning_rate = learning_rate

    def adopt(self, buckets: GradientBuckets) -> None:
        """See `Delivery.adopt`."""
        if buckets.plan.halves:
            raise halves_refused(buckets.plan.scheduler)
        install(buckets, self._backend, self._optimizer)
        self._buckets = buckets

    def reducer(self, step: StepState) -> GradientReducer:
        """See `Delivery.reducer`."""
        return GradientReducer(self._buckets, self._backend, step, self._learning_rate)

    def deliver(self, values: Mapping[int, torch.Tensor], step: int, unused: Unused) -> Gradients:
        """See `Delivery.deliver`; `values` are parameters, which are put in their places."""
        self._refuse_non_finite(values, step, "parameter")
        with torch.no_grad():
            for tensor, value in values.items():
                self._buckets.parameters[tensor].copy_(value)
        return dict.fromkeys(values)


def delivery_of(
    backend: Backend, check_finite: bool, optimizer: Callable[[], str], rate: Callable[[], float]
) -> Delivery:
    """How gradients that nothing compresses become what the optimizer is given.

    Args:
        backend: opened.
        check_finite: report NaN and infinity.
        optimizer: tells it in words that servers understand.
        rate: tells the learning rate of the step that is being computed.
    """
    if Op.APPLY in backend.capabilities.ops:
        return ServerParameters(backend, optimizer(), rate, check_finite)
    if backend.size == 1:
        return OwnGradients(backend, 1, check_finite)
    divisor = backend.size if backend.capabilities.exchanges else 1
    return MeanGradients(backend, divisor, check_finite)


class DeferredUpdate:
    """A step that each layer takes just before it is used again, with the rest of its messages.

    Args:
        reducer: of the step; all its messages have been submitted.
        delivery: makes gradients of what arrives.
        buckets: of the step's plan.
        optimizer: takes the step, with the settings that it has now.
        unused: see `Delivery.deliver`.

    Attributes:
        left: tensors whose parameters have not been updated yet.
        unread: tensors of which nobody has said that they are about to be read.
        is_stepping: the optimizer is being run for some of them.
    """

    def __init__(
        self,
        reducer: GradientReducer,
        delivery: Delivery,
        buckets: GradientBuckets,
        optimizer: torch.optim.Optimizer,
        unused: Unused,
    ) -> None:
        self.left = dict.fromkeys(range(len(buckets.parameters)))
        self.unread = set(self.left)
        self.is_stepping = False
        self._reducer = reducer
        self._delivery = delivery
        self._buckets = buckets
        self._parameters = buckets.parameters
        self._unused = unused
        self._step = DeferredStep(optimizer, None if buckets.release is None else SLICE_ELEMENTS)

    def read(self, tensors: Sequence[int]) -> None:
        """Update those of these tensors that are left: they are about to be read.

        With them goes what has come whole in their messages: a step of the optimizer for all layers
        of a message costs less than one for each. Not so without gradients, where one rank may
        evaluate alone: of what it does not read it may have to ask the others.

        Raises:
            NonFiniteGradient: a value holds NaN or infinity.
        """
        self.unread.difference_update(tensors)
        self.take(tensors, along=torch.is_grad_enabled())

    def take(self, tensors: Sequence[int], *, along: bool = False) -> None:
        """Update those of these tensors that are left, once their messages have ended.

        Args:
            tensors: numbers.
            along: also those that share a message with them and wait for no other.

        Raises:
            NonFiniteGradient: a value holds NaN or infinity.
        """
        chosen = [tensor for tensor in tensors if tensor in self.left]
        if not chosen:
            return
        for tensor in chosen:
            del self.left[tensor]
            self._reducer.land(tensor)
        if along:
            chosen += self._come_with(chosen)
        values = {tensor: self._reducer.collect(tensor) for tensor in chosen}
        self._use(values)
        for tensor in chosen:
            self._reducer.drop(tensor)

    def _come_with(self, tensors: Sequence[int]) -> list[int]:
        buckets = self._buckets
        numbers = dict.fromkeys(n for tensor in tensors for n in buckets.messages_of[tensor])
        beside = dict.fromkeys(tensor for number in numbers for tensor in buckets.places[number])
        come = [t for t in beside if t in self.left and self._reducer.has_landed(t)]
        for tensor in come:
            del self.left[tensor]
        return come

    def _use(self, values: Mapping[int, torch.Tensor]) -> None:
        """Take the step with what the exchange has brought."""
        self._apply(self._delivery.deliver(values, self._reducer.number, self._unused))

    def _apply(self, gradients: Gradients) -> None:
        used = {tensor: g for tensor, g in gradients.items() if g is not None}
        if not used:
            return
        self.is_stepping = True
        try:
            self._step.take([self._parameters[tensor] for tensor in used], list(used.values()))
        finally:
            self.is_stepping = False


# From sums to means, and what is wrong with a mean.


def _held(value: torch.Tensor) -> torch.Tensor:
    """What tells of a value whether it is finite, or zero: of a sparse one, the elements it has."""
    return value._values() if value.is_sparse else value


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


def check_optimizer(
    optimizer: torch.optim.Optimizer, exchanged: Container[int], frozen: Mapping[int, str]
) -> None:
    """Refuse gradients that the optimizer would use as they are on this rank.

    Args:
        optimizer: about to step.
        exchanged: identities of the parameters whose gradients are exchanged.
        frozen: names of the model's other parameters, by identity.

    Raises:
        UsageError: names the parameter.
    """
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if parameter.grad is not None and id(parameter) not in exchanged:
                name = frozen.get(id(parameter))
                unnamed = f"parameter {place} of the optimizer's group {number}"
                raise never_exchanged(unnamed if name is None else repr(name))


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
        advice = "lower the learning rate or clip with --clip-norm"
        if tensor.dtype is torch.float16:
            advice = "ranks' gradients are added in float16 before they are divided: use bfloat16"
        raise NonFiniteGradient(
            f"{what} of {name!r} has {bad} after the exchange of step {step}; expected finite "
            f"numbers; {advice}"
        )
