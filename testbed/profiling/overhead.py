"""Time of a training step beside forward, backward and messages: fetch samples, update."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Overhead:
    """Seconds of a step that no trace holds.

    Attributes:
        fetch_s: samples of one micro-batch, brought to the device.
        update_s: clipping, the optimizer's step, clearing the gradients.
    """

    fetch_s: float = 0.0
    update_s: float = 0.0

    def of_step_s(self, micro_batches: int) -> float:
        """Seconds of one step.

        Example:
            >>> Overhead(fetch_s=1.0, update_s=5.0).of_step_s(2)
            7.0
        """
        return micro_batches * self.fetch_s + self.update_s


def measure_overhead(
    fetch: Callable[[], object],
    compute: Callable[[], object],
    update: Callable[[], object],
    device: torch.device,
    *,
    warmup: int = 2,
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> Overhead:
    """Medians over whole steps; the first ones allocate the optimizer's state.

    Args:
        fetch: brings a micro-batch to the device.
        compute: makes gradients; not timed.
        update: uses them up.
        device: is waited for before each time is taken.
        warmup: steps that are not measured.
        repeats: steps that are.
        clock: tells the time in seconds.
    """
    fetches_s, updates_s = [], []
    for number in range(warmup + repeats):
        fetch_s = _timed_s(fetch, device, clock)
        compute()
        update_s = _timed_s(update, device, clock)
        if number >= warmup:
            fetches_s.append(fetch_s)
            updates_s.append(update_s)
    return Overhead(statistics.median(fetches_s), statistics.median(updates_s))


def _timed_s(
    action: Callable[[], object], device: torch.device, clock: Callable[[], float]
) -> float:
    _settle(device)
    start_s = clock()
    action()
    _settle(device)
    return clock() - start_s


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# One training step's computation on a fixed batch, in the two halves that are timed apart.

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
