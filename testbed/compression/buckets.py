"""Runs of values that share a scale."""

from __future__ import annotations

import torch

from testbed.errors import UsageError


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
