"""A mean of few elements as a sparse tensor of torch's, [n]: their indices, ascending, and values.

Such a tensor holds both as they are; what it does not name is 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def sparse_tensor(indices: torch.Tensor, values: torch.Tensor, num_elements: int) -> torch.Tensor:
    """Values [k] at ascending distinct indices [k], as a sparse tensor that holds both.

    Example:
        >>> sparse_tensor(torch.tensor([2]), torch.tensor([1.5]), 4).to_dense()
        tensor([0.0000, 0.0000, 1.5000, 0.0000])
    """
    return torch.sparse_coo_tensor(
        indices.view(1, -1), values, (num_elements,), check_invariants=False, is_coalesced=True
    )


def part_of(sparse: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """Elements `low .. high - 1` of a sparse tensor, as one.

    Example:
        >>> whole = sparse_tensor(torch.tensor([0, 2]), torch.tensor([1.0, 2.0]), 4)
        >>> part_of(whole, 1, 4).to_dense()
        tensor([0., 2., 0.])
    """
    if (low, high) == (0, sparse.numel()):
        return sparse
    indices = sparse._indices()[0]
    bounds = torch.tensor((low, high), device=indices.device)
    first, end = torch.searchsorted(indices, bounds).tolist()
    return sparse_tensor(indices[first:end] - low, sparse._values()[first:end], high - low)


def joined(pieces: Sequence[tuple[torch.Tensor, int]], num_elements: int) -> torch.Tensor:
    """Sparse tensors, and where each begins, ascending, as one of `num_elements` elements.

    Example:
        >>> one = sparse_tensor(torch.tensor([1]), torch.tensor([2.0]), 2)
        >>> joined([(one, 0), (one, 2)], 4).to_dense()
        tensor([0., 2., 0., 2.])
    """
    if len(pieces) == 1 and pieces[0][0].numel() == num_elements:
        return pieces[0][0]
    indices = torch.cat([piece._indices()[0] + start for piece, start in pieces])
    return sparse_tensor(indices, torch.cat([piece._values() for piece, _ in pieces]), num_elements)


def elements(tensor: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """Elements `low .. high - 1` of a tensor, densely; a view unless it is sparse.

    Example:
        >>> elements(sparse_tensor(torch.tensor([2]), torch.tensor([1.5]), 4), 1, 3)
        tensor([0.0000, 1.5000])
    """
    if not tensor.is_sparse:
        return tensor.view(-1)[low:high]
    part = part_of(tensor, low, high)
    return part._values().new_zeros(high - low).index_copy_(0, part._indices()[0], part._values())
