"""Records one step of a model with its loss and optimizer, before anything is trained."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from testbed.base.errors import UsageError
from testbed.memory.capture import Rates, Recording
from testbed.memory.lifetimes import Lifetimes

Loss = Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], torch.Tensor]


class _Loss(torch.nn.Module):
    """The loss of a model as a module, so that other tensors can stand for its parameters."""

    def __init__(self, model: torch.nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The loss."""
        return self._loss(self.model, batch)


def record(
    model: torch.nn.Module,
    loss: Loss,
    batch: tuple[torch.Tensor, ...],
    optimizer: torch.optim.Optimizer | None = None,
    rates: Rates | None = None,
) -> Lifetimes:
    """The lifetimes of one step of training, without computing or allocating anything.

    Args:
        model: that is trained; left as it is.
        loss: `loss(model, batch)`, a tensor of one element.
        batch: samples of one step (of one micro-batch, where gradients are accumulated).
        optimizer: of its parameters; None: nothing is kept between steps.
        rates: how fast operators run.

    Raises:
        UsageError: the step cannot be run without values.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> step = record(model, lambda m, batch: m(*batch).sum(), (torch.zeros(2, 4),))
        >>> step.units[:3], [v.num_bytes for v in step.values if v.uses]
        (('0', '1', '2'), [64])
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    named = {name: fake.from_tensor(p) for name, p in model.named_parameters()}
    kept = {**named, **{name: fake.from_tensor(b) for name, b in model.named_buffers()}}
    given = tuple(fake.from_tensor(t) for t in batch)
    trained = [(n, named[n]) for n, p in model.named_parameters() if p.requires_grad]
    recording = Recording(trained, rates or Rates())
    weight_bytes = recording.sources([*kept.values(), *given])
    wrapped = _Loss(model, loss)
    standing_in: dict[str, torch.Tensor] = {f"model.{n}": tensor for n, tensor in kept.items()}
    with fake:
        try:
            recording.run(model, lambda: torch.func.functional_call(wrapped, standing_in, (given,)))
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise UsageError(
                f"the memory of a step cannot be foreseen: {error} depends on the values of "
                "tensors; expected a model whose shapes and branches do not"
            ) from error
    return recording.lifetimes(weight_bytes, 0)
