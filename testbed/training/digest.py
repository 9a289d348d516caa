"""Digests that prove equal work: of tensors, of sample indices, of what ranks must agree on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch


def digest_tensors(tensors: Iterable[torch.Tensor]) -> str:
    """SHA-256 over shapes, dtypes and bytes, in order; equal only if all bits are.

    Example:
        >>> digest_tensors([torch.zeros(2)]) == digest_tensors([torch.zeros(2)])
        True
    """
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(f"{tuple(tensor.shape)} {tensor.dtype};".encode())
        plain = tensor.detach().cpu().contiguous().view(-1)
        state.update(plain.view(torch.uint8).numpy().data if plain.numel() else b"")
    return state.hexdigest()


def describe_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """One line per tensor with all that ranks must agree on before training."""
    return [f"{name} {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for name, t in named]


class RunningDigest:
    """A chain of digests, h <- SHA-256(h || data): its value is its whole state, so it can resume.

    Args:
        value: where to go on; empty = from the start.
    """

    def __init__(self, value: str = "") -> None:
        self.value = value

    def add(self, data: bytes) -> None:
        """Append bytes."""
        self.value = hashlib.sha256(bytes.fromhex(self.value) + data).hexdigest()
