"""Values and their indices as one payload; dense at the break-even.

    bytes(n, k) = min(k e + index_bytes(n, k), n e)        e: bytes of an element

There is no header: bytes(n, k) grows with k until the payload is dense, so its length tells k and
the form. For float32 no element costs more than 8 bytes.
"""

from __future__ import annotations

import functools

import torch

from testbed.compression.indices import index_bytes, pack_indices, unpack_indices
from testbed.errors import UsageError


def sparse_bytes(num_elements: int, count: int, element_bytes: int) -> int:
    """Bytes of `count` of `num_elements` elements.

    Example:
        >>> sparse_bytes(25_000_000, 250_000, 4), sparse_bytes(100, 100, 4), sparse_bytes(9, 0, 4)
        (1267578, 400, 0)
    """
    if count == 0:
        return 0
    sparse = count * element_bytes + index_bytes(num_elements, count)
    return min(sparse, num_elements * element_bytes)


def pack_sparse(indices: torch.Tensor, selected: torch.Tensor, num_elements: int) -> torch.Tensor:
    """A payload (uint8) of the values `selected` [k] at the ascending `indices` [k].

    Example:
        >>> pack_sparse(torch.tensor([3]), torch.tensor([1.0]), 1000).numel()
        6
    """
    count = indices.numel()
    if sparse_bytes(num_elements, count, selected.element_size()) == num_elements * (
        selected.element_size()
    ):
        dense = torch.zeros(num_elements, dtype=selected.dtype, device=selected.device)
        dense[indices] = selected
        return dense.view(torch.uint8)
    return torch.cat([selected.view(torch.uint8), pack_indices(indices, num_elements)])


def unpack_sparse(payload: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The indices [k], ascending, and values [k] of a payload; of a dense one, all n.

    Args:
        payload: from `pack_sparse`.
        like: [n]: size, dtype and device of what was packed.

    Raises:
        UsageError: no number of elements has this many bytes.

    Example:
        >>> packed = pack_sparse(torch.tensor([3]), torch.tensor([1.5]), 1000)
        >>> unpack_sparse(packed, torch.zeros(1000))
        (tensor([3]), tensor([1.5000]))
    """
    num_elements, width = like.numel(), like.element_size()
    if payload.numel() == num_elements * width:
        return torch.arange(num_elements, device=like.device), as_values(payload, like)
    count = sparse_count(payload.numel(), num_elements, width)
    selected = as_values(payload[: count * width], like)
    return unpack_indices(payload[count * width :], num_elements, count), selected


def as_values(payload: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Bytes as numbers of the dtype of `like`, copied only where they lie unaligned.

    Example:
        >>> as_values(torch.zeros(9, dtype=torch.uint8)[1:], torch.zeros(2)).tolist()
        [0.0, 0.0]
    """
    if payload.storage_offset() % like.element_size() or payload.data_ptr() % like.element_size():
        payload = payload.clone()
    return payload.contiguous().view(like.dtype)


@functools.lru_cache(maxsize=4096)
def sparse_count(num_bytes: int, num_elements: int, element_bytes: int) -> int:
    """The k whose payload has that many bytes, by bisection; n for a dense one.

    Raises:
        UsageError: no number of elements has this many bytes.

    Example:
        >>> sparse_count(sparse_bytes(1000, 7, 4), 1000, 4), sparse_count(4000, 1000, 4)
        (7, 1000)
    """
    if num_bytes == num_elements * element_bytes:
        return num_elements
    below, above = 0, min(num_elements, num_bytes // element_bytes)
    while below < above:
        middle = (below + above) // 2
        if sparse_bytes(num_elements, middle, element_bytes) < num_bytes:
            below = middle + 1
        else:
            above = middle
    if sparse_bytes(num_elements, below, element_bytes) != num_bytes:
        raise UsageError(
            f"a payload of {num_bytes} bytes is no selection from {num_elements} elements of "
            f"{element_bytes} bytes; both ends must use the same options and the same message"
        )
    return below
