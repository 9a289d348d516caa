"""What gradients of parameters, their updates and their exchange take in a step. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from testbed.memory.planning.lifetimes import Costs, Lifetimes

SLICE_ELEMENTS: Final = 1 << 18
"""Of large parameters whose gradients are released, the optimizer updates so many at a time."""
HELD_BYTES: Final = 4 << 20
"""Of released gradients, those that need no room for others are used together once they have so
many bytes: for each tensor by itself the optimizer's step would take longer than it is worth."""

Levels = npt.NDArray[np.int64]


def row_of(in_flight: int) -> int:
    """How many gradients in a row must have room: an operator makes those of weight and bias."""
    return max(2, in_flight)


def largest_row(sizes: Sequence[int], row: int) -> int:
    """The largest sum of so many in a row.

    Example:
        >>> largest_row([1, 5, 2, 4], 2)
        7
    """
    return max((sum(sizes[first : first + row]) for first in range(len(sizes))), default=0)


def gradient_bytes(step: Lifetimes, costs: Costs) -> Levels:
    """Bytes of parameters' gradients alive at each position; of micro-batches before, from 0 on."""
    change = np.zeros(step.num_positions + 1, dtype=np.int64)
    leave = _left_at(step, costs.in_flight, costs.row, costs.held_bytes)
    for gradient, end in zip(step.gradients, leave, strict=True):
        change[0 if step.accumulates else gradient.position] += gradient.num_bytes
        change[max(end, gradient.position + 1)] -= gradient.num_bytes
        if step.accumulates:  # what is added to it
            change[gradient.position] += gradient.num_bytes
            change[gradient.position + 1] -= gradient.num_bytes
    return np.cumsum(change[:-1])


def _left_at(step: Lifetimes, at_once: int | None, row: int, held_bytes: int = 0) -> list[int]:
    """When each gradient, or its message, is gone; after the last position if it stays."""
    gradients = step.gradients
    found = [step.num_positions] * len(gradients)
    if at_once is None:
        return found
    sizes = [gradient.num_bytes for gradient in gradients]
    if held_bytes:
        first = 0
        for number, gradient in enumerate(gradients):
            if sum(sizes[first : number + 1]) >= held_bytes:
                found[first : number + 1] = [gradient.position + 1] * (number + 1 - first)
                first = number + 1
        return found
    room = largest_row(sizes, row)
    first = 0  # of those that are on their way
    for number, gradient in enumerate(gradients):
        while first <= number - at_once:
            found[first] = gradient.position
            first += 1
        while row and first <= number and sum(sizes[first : number + 1 + row]) > room:
            found[first] = gradient.position
            first += 1
    return found


def update_bytes(step: Lifetimes, in_flight: int | None) -> Levels:
    """What the optimizer needs beside its state: at the end, or where each gradient is ready."""
    needed = np.zeros(step.num_positions, dtype=np.int64)
    if in_flight is None:
        needed[-1] = step.update_bytes
    else:
        for gradient in step.gradients:
            at_once = min(gradient.num_bytes, step.update_slice_bytes or gradient.num_bytes)
            needed[gradient.position] += round(at_once * step.update_share)
    return needed


def exchange_bytes(step: Lifetimes, costs: Costs) -> Levels:
    """What gradients on their way need beside themselves: while the next ones are made."""
    change = np.zeros(step.num_positions + 1, dtype=np.int64)
    if costs.exchange_bytes:
        ends = _left_at(step, costs.exchanges_at_once, costs.row)
        pairs = zip(step.gradients, costs.exchange_bytes, ends, strict=True)
        for gradient, needed, end in pairs:
            if end == gradient.position:  # it is waited for at once
                change[end] += needed
                change[end + 1] -= needed
            else:
                change[gradient.position + 1] += needed
                change[min(end + 1, step.num_positions)] -= needed
    return np.cumsum(change[:-1])
