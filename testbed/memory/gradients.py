"""What gradients of parameters, their updates and their exchange take in a step. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from testbed.memory.lifetimes import Costs, Lifetimes

Levels = npt.NDArray[np.int64]


def gradient_bytes(step: Lifetimes, in_flight: int | None) -> Levels:
    """Bytes of parameters' gradients alive at each position."""
    change = np.zeros(step.num_positions + 1, dtype=np.int64)
    for number, gradient in enumerate(step.gradients):
        change[gradient.position] += gradient.num_bytes
        if in_flight is not None:
            after = number + in_flight
            gone = after < len(step.gradients)
            end = step.gradients[after].position if gone else step.num_positions
            change[max(end, gradient.position + 1)] -= gradient.num_bytes
    return np.cumsum(change[:-1])


def update_bytes(step: Lifetimes, in_flight: int | None) -> Levels:
    """What the optimizer needs beside its state: at the end, or where each gradient is ready."""
    needed = np.zeros(step.num_positions, dtype=np.int64)
    if in_flight is None:
        needed[-1] = step.update_bytes
    else:
        for gradient in step.gradients:
            needed[gradient.position] += round(gradient.num_bytes * step.update_share)
    return needed


def exchange_bytes(step: Lifetimes, costs: Costs) -> Levels:
    """What gradients on their way need beside themselves."""
    change = np.zeros(step.num_positions + 1, dtype=np.int64)
    if costs.exchange_share:
        window = costs.exchanges_at_once
        for number, gradient in enumerate(step.gradients):
            needed = round(gradient.num_bytes * costs.exchange_share)
            after = number + window
            there = after < len(step.gradients)
            change[gradient.position + 1] += needed
            change[step.gradients[after].position + 1 if there else step.num_positions] -= needed
    return np.cumsum(change[:-1])
