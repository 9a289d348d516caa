"""The mean of sparse payloads: added in rank order, so that it is identical on all ranks."""

from __future__ import annotations

import torch

from testbed.compression.select import above
from testbed.compression.sparse import pack_sparse, unpack_sparse


class SparseMerger:
    """See `Merger`; for payloads made by `pack_sparse`.

    On a server the merged payload holds the union of all selections: it grows with the ranks
    until it is dense, which a ring's gather never does.
    """

    def combine(self, payloads: tuple[torch.Tensor, ...], like: torch.Tensor) -> torch.Tensor:
        """See `Merger.combine`.

        Example:
            >>> parts = (pack_sparse(torch.tensor([3]), torch.tensor([4.0]), 6),) * 2
            >>> SparseMerger().combine(parts, torch.zeros(6)).tolist()
            [0.0, 0.0, 0.0, 4.0, 0.0, 0.0]
        """
        total = torch.zeros_like(like)
        for payload in payloads:
            add_sparse(total, payload)
        return total.div_(len(payloads))

    def pack_mean(self, mean: torch.Tensor) -> torch.Tensor:
        """See `Merger.pack_mean`: what is not zero, or all of it."""
        tiny = torch.finfo(mean.dtype).smallest_normal * torch.finfo(mean.dtype).eps
        indices = above(mean, tiny)
        return pack_sparse(indices, mean[indices], mean.numel())

    def unpack_mean(self, payload: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """See `Merger.unpack_mean`."""
        return add_sparse(torch.zeros_like(like), payload)


def add_sparse(total: torch.Tensor, payload: torch.Tensor) -> torch.Tensor:
    """Add a sparse payload to a dense tensor [n], in place.

    Example:
        >>> add_sparse(torch.ones(3), pack_sparse(torch.tensor([1]), torch.tensor([4.0]), 3))
        tensor([1., 5., 1.])
    """
    indices, selected = unpack_sparse(payload, total)
    if indices.numel() == total.numel():
        return total.add_(selected)
    # Indices are distinct, so this equals an addition at each of them, in any order.
    return total.index_add_(0, indices, selected)
