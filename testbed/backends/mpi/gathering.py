"""What ranks tell each other before tensors of unequal sizes come together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from testbed.backends.agreement import one_dtype
from testbed.backends.mpi.dtypes import SUPPORTED

HEAD_ELEMENTS = 2  # number of elements, place of the dtype in SUPPORTED


def head_of(tensor: torch.Tensor) -> torch.Tensor:
    """Size and dtype of a rank's tensor, as two int64."""
    return torch.tensor([tensor.numel(), SUPPORTED.index(tensor.dtype)])


def sizes_from(heads: torch.Tensor) -> list[int]:
    """Number of elements of every rank, from the heads of all ranks (n x 2).

    Raises:
        Disagreement: the ranks gave different dtypes.

    Example:
        >>> sizes_from(torch.tensor([[3, 0], [5, 0]]))
        [3, 5]
    """
    one_dtype([SUPPORTED[int(code)] for code in heads[:, 1]])
    return [int(size) for size in heads[:, 0]]


def parts_of(together: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Views of the parts that lie one after the other in `together`."""
    parts: list[torch.Tensor] = []
    begin = 0
    for size in sizes:
        parts.append(together[begin : begin + size])
        begin += size
    return tuple(parts)
