"""One training step's computation on a fixed batch, in the two halves that are timed apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Batch = tuple[torch.Tensor, ...]


def _backward(loss: torch.Tensor) -> None:
    torch.autograd.backward(loss)


@dataclass(frozen=True)
class Step:
    """Forward and loss, then backward; calling it runs both, always on the same batch.

    The halves are apart because nothing in a whole step tells when its backward pass begins.

    Attributes:
        forward: forward pass and loss; returns the scalar to differentiate.
        backward: what `loss.backward()` would be.

    Example:
        >>> weight = torch.ones(1, requires_grad=True)
        >>> Step(lambda: (3 * weight).sum())()
        >>> weight.grad
        tensor([3.])
    """

    forward: Callable[[], torch.Tensor]
    backward: Callable[[torch.Tensor], None] = _backward

    def __call__(self) -> None:
        """Run the whole step; gradients are added to those that are there."""
        self.backward(self.forward())


def training_step(
    loss: Callable[[Batch], torch.Tensor],
    batch: Batch,
    scaler: torch.amp.GradScaler | None = None,
) -> Step:
    """The step that a trainer takes: `training_step(replica.loss, batch, replica.scaler)`.

    Args:
        loss: forward pass and loss of a batch.
        batch: on the model's device already, so that its transport is not timed.
        scaler: of the mixed precisions that scale the loss.
    """
    if scaler is None:
        return Step(lambda: loss(batch))
    return Step(lambda: scaler.scale(loss(batch)))
