"""Small unsigned numbers packed bit by bit into bytes, lowest bit first.

Eight codes of `width` bits fill `width` bytes exactly, so all groups of eight are packed by the
same few shifts, on any device. Few and narrow codes go through one 64-bit word for each group,
which takes a fifth of the operations and eight times the memory; very few on a CPU go bit by bit
through NumPy, in two operations.
"""

from __future__ import annotations

import numpy as np
import torch

from testbed.base.errors import UsageError

_FEW = 1 << 16  # codes, up to which the number of operations counts for more than memory
_VERY_FEW = 1 << 10
_WORD = 8  # bytes


def packed_bytes(num_codes: int, width: int) -> int:
    """Bytes of that many codes: ceil(count * width / 8).

    Example:
        >>> packed_bytes(3, 6), packed_bytes(0, 6)
        (3, 0)
    """
    return -(-num_codes * width // 8)


def pack_codes(codes: torch.Tensor, width: int) -> torch.Tensor:
    """Codes [k] (integers in 0 .. 2^width - 1, width 0 .. 32) as bytes [ceil(k width / 8)].

    Example:
        >>> pack_codes(torch.tensor([1, 2, 3]), 4).tolist()
        [33, 3]
    """
    count = codes.numel()
    size = packed_bytes(count, width)
    if size == 0:
        return torch.empty(0, dtype=torch.uint8, device=codes.device)
    if width == 1 and codes.device.type == "cpu":
        bits = codes.to(torch.bool).numpy()
        return torch.from_numpy(np.packbits(bits, bitorder="little"))
    if width <= 8 and count <= _VERY_FEW and codes.device.type == "cpu":
        bytes_of = codes.to(torch.uint8).numpy()[:, None]
        bits = np.unpackbits(bytes_of, axis=1, count=width, bitorder="little")
        return torch.from_numpy(np.packbits(bits, bitorder="little"))
    num_groups = -(-count // 8)
    by_words = width <= _WORD and count <= _FEW
    work = torch.uint8 if width <= 8 and not by_words else torch.int64
    padded = torch.zeros(num_groups * 8, dtype=work, device=codes.device)
    padded[:count] = codes
    groups = padded.view(num_groups, 8)
    if by_words:
        words = (groups << _shifts(width, codes.device)).sum(1)  # disjoint bits: a sum is an or
        # Of one byte a word the result would be a view with gaps.
        return _bytes_of(words)[:, :width].reshape(-1)[:size].contiguous()
    out = torch.zeros(num_groups, width, dtype=torch.uint8, device=codes.device)
    for code in range(8):
        for byte, shift in _places(code, width):
            column = groups[:, code]
            moved = column << shift if shift >= 0 else column >> -shift
            out[:, byte] |= moved if work is torch.uint8 else (moved & 255).to(torch.uint8)
    return out.view(-1)[:size]


def unpack_codes(packed: torch.Tensor, count: int, width: int) -> torch.Tensor:
    """The codes [count] that `pack_codes` packed; uint8 up to 8 bits, int64 above.

    Raises:
        ValueError: another number of bytes than so many codes have.

    Example:
        >>> unpack_codes(torch.tensor([33, 3], dtype=torch.uint8), 3, 4).tolist()
        [1, 2, 3]
    """
    if packed.numel() != packed_bytes(count, width):
        raise ValueError(
            f"{packed.numel()} bytes were given for {count} codes of {width} bits; expected "
            f"{packed_bytes(count, width)}"
        )
    work = torch.uint8 if width <= 8 else torch.int64
    if count == 0 or width == 0:
        return torch.zeros(count, dtype=work, device=packed.device)
    if width == 1 and packed.device.type == "cpu":
        bits = np.unpackbits(packed.contiguous().numpy(), count=count, bitorder="little")
        return torch.from_numpy(bits)
    if width <= 8 and count <= _VERY_FEW and packed.device.type == "cpu":
        given = packed.contiguous().numpy()
        rows = np.unpackbits(given, count=count * width, bitorder="little").reshape(count, width)
        return torch.from_numpy(np.packbits(rows, axis=1, bitorder="little").reshape(-1))
    num_groups = -(-count // 8)
    padded = torch.zeros(num_groups * width, dtype=torch.uint8, device=packed.device)
    padded[: packed.numel()] = packed
    columns = padded.view(num_groups, width)
    if width <= _WORD and count <= _FEW:
        words = torch.zeros(num_groups, dtype=torch.int64, device=packed.device)
        _bytes_of(words)[:, :width] = columns
        few = (words[:, None] >> _shifts(width, packed.device)) & ((1 << width) - 1)
        return few.view(-1)[:count].to(torch.uint8)
    out = torch.zeros(num_groups, 8, dtype=work, device=packed.device)
    for code in range(8):
        for byte, shift in _places(code, width):
            column = columns[:, byte].to(work)
            out[:, code] |= column >> shift if shift >= 0 else column << -shift
    return (out.view(-1) & ((1 << width) - 1))[:count]


def pack_codes_plainly(codes: list[int], width: int) -> list[int]:
    """The same bytes, one bit after another: the reference of the tests.

    Example:
        >>> pack_codes_plainly([1, 2, 3], 4)
        [33, 3]
    """
    stream = sum(code << (width * i) for i, code in enumerate(codes))
    return list(stream.to_bytes(packed_bytes(len(codes), width), "little"))


def _places(code: int, width: int) -> list[tuple[int, int]]:
    """(byte, left shift) of each byte of its group that a code reaches into."""
    first, last = code * width // 8, (code * width + width - 1) // 8
    return [(byte, code * width - 8 * byte) for byte in range(first, last + 1)]


def _shifts(width: int, device: torch.device) -> torch.Tensor:
    """Where the eight codes of a group begin in its word."""
    return torch.arange(0, 8 * width, width, device=device)


def _bytes_of(words: torch.Tensor) -> torch.Tensor:
    """The memory of int64 words [m] as bytes [m, 8], the lowest first (little-endian machines)."""
    return words.view(torch.uint8).view(-1, _WORD)


# Buckets: runs of values that share a scale.


def num_buckets(num_elements: int, bucket: int) -> int:
    """How many buckets a message has; with bucket 0, one.

    Example:
        >>> num_buckets(1000, 512), num_buckets(1000, 0), num_buckets(0, 512)
        (2, 1, 0)
    """
    return -(-num_elements // bucket) if bucket else 1


def in_buckets(values: torch.Tensor, bucket: int) -> torch.Tensor:
    """Values [n] as [buckets, size], the last one filled up with zeros.

    Example:
        >>> in_buckets(torch.ones(3), 2).tolist()
        [[1.0, 1.0], [1.0, 0.0]]
    """
    size = bucket or max(1, values.numel())
    return torch.nn.functional.pad(values, (0, -values.numel() % size)).view(-1, size)


def for_each(scales: torch.Tensor, bucket: int, num_elements: int) -> torch.Tensor:
    """Each value's scale [n], or the only one [1] for all.

    Example:
        >>> for_each(torch.tensor([1.0, 2.0]), 2, 3).tolist()
        [1.0, 1.0, 2.0]
    """
    return scales.repeat_interleave(bucket)[:num_elements] if bucket else scales


def sizes_of(num_elements: int, bucket: int, like: torch.Tensor) -> torch.Tensor:
    """Values in each bucket [buckets], in the dtype and on the device of `like`.

    Example:
        >>> sizes_of(3, 2, torch.zeros(1)).tolist()
        [2.0, 1.0]
    """
    return in_buckets(torch.ones(num_elements, dtype=like.dtype, device=like.device), bucket).sum(1)


def require_bucket(part: str, bucket: int) -> None:
    """0 (all of a message) or at least 8 values.

    Raises:
        UsageError: it is neither.

    Example:
        >>> require_bucket("qsgd", 512)
    """
    if bucket != 0 and bucket < 8:
        raise UsageError(f"{part} bucket is {bucket}; expected 8 or more, or 0 for all values")
