"""Tensors as bytes and bytes as tensors, without copies."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from testbed.backends.zmq_ps.wire import DTYPES

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_KNOWN_TO_NUMPY = frozenset(TORCH_DTYPES.values()) - {torch.bfloat16}

SHARED_BATCH_BYTES = 16 * 1024
"""ZeroMQ hands out smaller messages as pieces of one receive buffer, with any alignment."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """The memory of a contiguous CPU tensor, of any dtype; writing there writes the tensor."""
    plain = tensor.detach()
    if plain.dtype in _KNOWN_TO_NUMPY:
        known: Bytes = plain.numpy().reshape(-1).view(np.uint8)  # half the time of what is below
        return known
    return plain.reshape(-1).view(torch.uint8).numpy()


def tensor_of(buffer: memoryview, dtype: str) -> torch.Tensor:
    """A flat tensor over received bytes, which it keeps alive; short ones are copied.

    Args:
        buffer: writable bytes, a whole number of elements.
        dtype: one of `wire.DTYPES`.
    """
    if buffer.nbytes == 0:
        return torch.empty(0, dtype=TORCH_DTYPES[dtype])
    owner = bytearray(buffer) if buffer.nbytes < SHARED_BATCH_BYTES else buffer
    return torch.frombuffer(owner, dtype=TORCH_DTYPES[dtype])


def copy_in(target: Bytes, first_byte: int, buffer: memoryview) -> None:
    """Write received bytes to their place; numpy lets other threads run meanwhile."""
    if buffer.nbytes:
        source = np.frombuffer(buffer, dtype=np.uint8)
        np.copyto(target[first_byte : first_byte + buffer.nbytes], source)
