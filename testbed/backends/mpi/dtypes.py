"""Which dtypes the MPI backends take, and what MPI calls them."""

from __future__ import annotations

import torch
from mpi4py import MPI

# The order is part of what ranks tell each other (GATHER), so new dtypes go to the end.
SUPPORTED: tuple[torch.dtype, ...] = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
)


def summed_as(dtype: torch.dtype) -> MPI.Datatype | None:
    """The type in which the MPI library can add; None where it has none (the 16-bit floats)."""
    return {
        torch.float32: MPI.FLOAT,
        torch.float64: MPI.DOUBLE,
        torch.int64: MPI.INT64_T,
        torch.int32: MPI.INT32_T,
        torch.int16: MPI.INT16_T,
        torch.int8: MPI.INT8_T,
        torch.uint8: MPI.UINT8_T,
    }.get(dtype)


def moved_as(dtype: torch.dtype) -> MPI.Datatype:
    """A type of the same width, for moving without adding (counts stay below 2^31 longer)."""
    return {1: MPI.INT8_T, 2: MPI.INT16_T, 4: MPI.INT32_T, 8: MPI.INT64_T}[dtype.itemsize]


def memory(tensor: torch.Tensor) -> MPI.buffer:
    """The bytes of a contiguous CPU tensor; holds no reference, so the caller keeps it alive."""
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.element_size())
