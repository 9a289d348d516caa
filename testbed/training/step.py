"""One step's computation, shared by the trainer and by the single-process reference."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import numpy.typing as npt
import torch

from testbed.training.replica import Replica


def backward(
    replica: Replica,
    indices: npt.NDArray[np.int64],
    num_parts: int,
    hold_back: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> float:
    """Forward and backward over a worker's samples of one step, in `num_parts` micro-batches.

    Args:
        replica: the worker's model.
        indices: its samples of this step.
        num_parts: micro-batches whose gradients are averaged before anything is exchanged.
        hold_back: context of every micro-batch but the last, in which gradients stay here.

    Returns:
        The mean loss.
    """
    size = len(indices) // num_parts
    total = 0.0
    for part in range(num_parts):
        chosen = indices[part * size : (part + 1) * size]
        batch = replica.to_device(replica.workload.train.batch(chosen))
        with hold_back() if part < num_parts - 1 else nullcontext():
            loss = replica.loss(batch) / num_parts
            total += float(loss.detach())
            scaled = replica.scaler.scale(loss) if replica.scaler is not None else loss
            torch.autograd.backward(scaled)
    return total


def update(replica: Replica, clip_norm: float | None) -> None:
    """Clip, step the optimizer and the schedule, and forget the gradients."""
    if replica.scaler is not None:
        replica.scaler.unscale_(replica.optimizer)
    if clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(replica.model.parameters(), clip_norm)
    if replica.scaler is not None:
        replica.scaler.step(replica.optimizer)
        replica.scaler.update()
    else:
        replica.optimizer.step()
    replica.schedule.step()
    replica.optimizer.zero_grad(set_to_none=True)
