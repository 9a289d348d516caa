"""Values and their indices as one payload; dense at the break-even.

    bytes(n, k) = min(k e + index_bytes(n, k), n e)        e: bytes of an element

There is no header: bytes(n, k) grows with k until the payload is dense, so its length tells k and
the form. For float32 no element costs more than 8 bytes.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from testbed.base.errors import UsageError
from testbed.compression.bits import pack_codes, packed_bytes, unpack_codes


def set_places(marks: torch.Tensor) -> torch.Tensor:
    """Ascending indices (int64) of the set marks; NumPy's is several times as fast where few are.

    Example:
        >>> set_places(torch.tensor([False, True])).tolist()
        [1]
    """
    if marks.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(marks.numpy()))
    return marks.nonzero().view(-1)


# Indices of selected elements, packed. Two forms; both ends tell from (n, k) which one is shorter:
#
# - deltas (Elias-Fano): of each ascending index the low `l` bits as they are, and the high parts as
#   gaps in unary: bit `(index >> l) + position` of a bitmap is set. Bits: k l + k + (n - 1 >> l),
#   without the bitmap where n <= 2^l; about 2 + log2(n / k) for each index, at most 32;
# - a bitmap of n bits.
#
# Reference: Elias, 1974, J. ACM; Fano, 1971.


@functools.lru_cache(maxsize=4096)
def low_bits(num_elements: int, count: int) -> int:
    """Low bits `l` of each index in the delta form: the cheapest, the smallest of equals.

    Example:
        >>> low_bits(25_000_000, 250_000), low_bits(8, 8)
        (6, 0)
    """
    widths = range(max(1, num_elements - 1).bit_length() + 1)
    return min(widths, key=lambda low: (_delta_bytes(num_elements, count, low), low))


@functools.lru_cache(maxsize=4096)
def index_bytes(num_elements: int, count: int) -> int:
    """Bytes of `count` distinct indices below `num_elements`.

    Example:
        >>> index_bytes(25_000_000, 250_000), index_bytes(800, 400), index_bytes(7, 0)
        (267578, 100, 0)
    """
    if count == 0:
        return 0
    deltas = _delta_bytes(num_elements, count, low_bits(num_elements, count))
    return min(deltas, packed_bytes(num_elements, 1))


def pack_indices(indices: torch.Tensor, num_elements: int) -> torch.Tensor:
    """Ascending distinct indices [k] as `index_bytes(n, k)` bytes.

    Example:
        >>> pack_indices(torch.tensor([1, 2, 7]), 8).tolist()
        [134]
    """
    count = indices.numel()
    if count == 0:
        return torch.empty(0, dtype=torch.uint8, device=indices.device)
    low = low_bits(num_elements, count)
    if packed_bytes(num_elements, 1) <= _delta_bytes(num_elements, count, low):
        return pack_codes(_marked(indices, num_elements), 1)
    lows = pack_codes(indices & ((1 << low) - 1), low)
    top = (num_elements - 1) >> low
    if top == 0:
        return lows
    places = indices >> low
    places += torch.arange(count, device=indices.device)
    return torch.cat([lows, pack_codes(_marked(places, count + top), 1)])


def unpack_indices(packed: torch.Tensor, num_elements: int, count: int) -> torch.Tensor:
    """The indices [count], int64, that `pack_indices` packed.

    Example:
        >>> unpack_indices(torch.tensor([134], dtype=torch.uint8), 8, 3).tolist()
        [1, 2, 7]
    """
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=packed.device)
    low = low_bits(num_elements, count)
    if packed_bytes(num_elements, 1) <= _delta_bytes(num_elements, count, low):
        return set_places(unpack_codes(packed, num_elements, 1).view(torch.bool))
    cut = packed_bytes(count, low)
    indices = unpack_codes(packed[:cut], count, low).to(torch.int64)
    top = (num_elements - 1) >> low
    if top == 0:
        return indices
    marks = unpack_codes(packed[cut:], count + top, 1).view(torch.bool)
    places = set_places(marks)  # of bytes NumPy would find them half as fast
    places -= torch.arange(count, device=packed.device)
    places <<= low
    return places.add_(indices)


@functools.lru_cache(maxsize=4096)
def _delta_bytes(num_elements: int, count: int, low: int) -> int:
    top = (num_elements - 1) >> low
    return packed_bytes(count, low) + (packed_bytes(count + top, 1) if top else 0)


def _marked(places: torch.Tensor, size: int) -> torch.Tensor:
    marks = torch.zeros(size, dtype=torch.bool, device=places.device)
    marks[places] = True
    return marks


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
