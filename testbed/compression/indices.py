"""Which elements were selected, in as few bytes as their number alone can tell.

Two forms; the shorter one is used, and both ends know which from (n, k):

- deltas (Elias-Fano): of each ascending index the low `l` bits as they are; the high parts as gaps
  in unary: bit `(index >> l) + position` of a bitmap is set. Bits: k l + k + (n - 1 >> l), and no
  bitmap at all when n <= 2^l. About 2 + log2(n / k) bits for each index, never above 4 bytes;
- a bitmap of n bits.

Reference:
    Elias, 1974, J. ACM; Fano, 1971.
"""

from __future__ import annotations

import functools

import torch

from testbed.compression.bits import pack_codes, packed_bytes, unpack_codes
from testbed.compression.select import set_places


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
    places = (indices >> low) + torch.arange(count, device=indices.device)
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
    return indices + ((places - torch.arange(count, device=packed.device)) << low)


@functools.lru_cache(maxsize=4096)
def _delta_bytes(num_elements: int, count: int, low: int) -> int:
    top = (num_elements - 1) >> low
    return packed_bytes(count, low) + (packed_bytes(count + top, 1) if top else 0)


def _marked(places: torch.Tensor, size: int) -> torch.Tensor:
    marks = torch.zeros(size, dtype=torch.bool, device=places.device)
    marks[places] = True
    return marks
