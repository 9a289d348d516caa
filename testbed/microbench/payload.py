"""What travels, chosen so that the exact result is known on every rank without any exchange.

Every rank's elements are small integers that repeat after PERIOD elements, a prime, so that pieces
which land at the wrong place do not look right. Every partial sum is exact in the dtype, whatever
the order of additions. Each exchange starts at another element of the pattern, so that a result
which is left over from an earlier exchange does not look right either.
"""

from __future__ import annotations

import random

import torch

from testbed.base.dtypes import Dtype
from testbed.records.comm import EXACT_UP_TO

PERIOD = 8191
LARGEST_VALUE = 16


def largest_value(dtype: Dtype, num_workers: int) -> int:
    """The largest element of any rank, such that the sum over all ranks is exact.

    Example:
        >>> largest_value("float32", 4), largest_value("uint8", 32)
        (16, 7)
    """
    return min(LARGEST_VALUE, EXACT_UP_TO[dtype] // num_workers)


def rank_pattern(rank: int, dtype: Dtype, num_workers: int) -> torch.Tensor:
    """The PERIOD elements that one rank's tensor repeats."""
    generator = random.Random(rank)
    top = largest_value(dtype, num_workers)
    return torch.tensor([generator.randint(0, top) for _ in range(PERIOD)], dtype=torch.int64)


def sum_pattern(dtype: Dtype, num_workers: int) -> torch.Tensor:
    """The PERIOD elements that the sum over all ranks repeats."""
    total = torch.zeros(PERIOD, dtype=torch.int64)
    for rank in range(num_workers):
        total += rank_pattern(rank, dtype, num_workers)
    return total


def fill(tensor: torch.Tensor, pattern: torch.Tensor, step: int) -> None:
    """Write the pattern of this step into a flat tensor.

    Args:
        tensor: [count], written.
        pattern: [PERIOD], of the tensor's dtype and device.
        step: number of the exchange; the pattern starts at its element `step % PERIOD`.
    """
    turned = torch.roll(pattern, -(step % PERIOD))
    rows = tensor.numel() // PERIOD
    tensor[: rows * PERIOD].view(rows, PERIOD).copy_(turned)
    tensor[rows * PERIOD :].copy_(turned[: tensor.numel() - rows * PERIOD])


def num_wrong(tensor: torch.Tensor, pattern: torch.Tensor, step: int) -> int:
    """Elements of a flat tensor that differ from the pattern of this step; NaN differs.

    Args:
        tensor: [count].
        pattern: [PERIOD], of the tensor's dtype and device.
        step: number of the exchange.
    """
    turned = torch.roll(pattern, -(step % PERIOD))
    rows = tensor.numel() // PERIOD
    body = tensor[: rows * PERIOD].view(rows, PERIOD) != turned
    tail = tensor[rows * PERIOD :] != turned[: tensor.numel() - rows * PERIOD]
    return int(body.sum()) + int(tail.sum())
