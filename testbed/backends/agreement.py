"""What ranks must have in common before their parts can be put together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from testbed.errors import Disagreement


def one_dtype(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The dtype that all ranks gave.

    Args:
        dtypes: of each rank, in rank order.

    Raises:
        Disagreement: they differ; names each rank's.

    Example:
        >>> one_dtype([torch.uint8, torch.uint8])
        torch.uint8
    """
    if len(set(dtypes)) > 1:
        given = ", ".join(f"rank {rank}: {dtype}" for rank, dtype in enumerate(dtypes))
        raise Disagreement(f"the ranks gave different dtypes ({given}); expected one dtype")
    return dtypes[0]
