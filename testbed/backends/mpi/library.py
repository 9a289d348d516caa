"""The `mpi` backend: the MPI library's own collectives, tested by the loop or called blocking.

The 16-bit floats, which MPI cannot add, are summed in a float32 staging buffer and rounded once at
the end; their traffic counts the float32 bytes that really travel. Which algorithm the library
runs is not visible, so traffic is counted by the bound that a ring meets: 2 (n - 1) / n of the
tensor for a sum, half of that for each half, and the tensor once for a broadcast; the parts of an
all-to-all cross once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from mpi4py import MPI

from testbed.backends.mpi.gather import (
    HEAD_ELEMENTS,
    head_of,
    moved_as,
    parts_of,
    sizes_from,
    traffic_of_parts,
)
from testbed.backends.mpi.loop import Steps, memory
from testbed.base.types import Op, Request, Result, Traffic, shard_bounds

# In which type the MPI library adds; it has none for the 16-bit floats.
_SUMMED_AS = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int64: MPI.INT64_T,
    torch.int32: MPI.INT32_T,
    torch.uint8: MPI.UINT8_T,
}


class LibraryCollectives:
    """`MPI_Iallreduce` and its like on one communicator per channel.

    Args:
        comms: one communicator per channel.
        blocking: call the blocking twins on the loop's thread instead.
    """

    def __init__(self, comms: Sequence[MPI.Comm], blocking: bool) -> None:
        self._comms = comms
        self._rank, self._size = comms[0].Get_rank(), comms[0].Get_size()
        self._blocking = blocking

    def steps(self, request: Request, about_to_end: Callable[[], None]) -> Steps[Result]:
        """See `Collectives.steps`."""
        comm, tensor = self._comms[request.channel], request.tensor
        if request.op is Op.ALL_TO_ALL:
            return self._all_to_all(comm, request.parts)
        if tensor is None:
            return self._barrier(comm)
        match request.op:
            case Op.ALL_REDUCE:
                return self._sum(comm, tensor)
            case Op.FOLD:
                return self._fold(comm, tensor)
            case Op.SPREAD:
                return self._spread(comm, tensor)
            case Op.ALL_GATHER:
                return self._all_gather(comm, tensor)
            case _:
                return self._broadcast(comm, tensor, request.root)

    def free(self) -> None:
        """See `Collectives.free`; nothing is kept between requests."""

    def _call(self, comm: MPI.Comm, name: str, *arguments: Any) -> Steps[None]:
        """`MPI_<name>` to its end: blocking, or its nonblocking twin tested by the loop."""
        if self._blocking:
            getattr(comm, name)(*arguments)
        else:
            yield getattr(comm, f"I{name.lower()}")(*arguments)

    def _sum(self, comm: MPI.Comm, tensor: torch.Tensor) -> Steps[Result]:
        flat = tensor.detach().view(-1)
        staged, kind = _addable(flat)
        yield from self._call(comm, "Allreduce", MPI.IN_PLACE, [memory(staged), kind])
        if staged is not flat:
            flat.copy_(staged)
        moved = self._share(2 * staged.numel() * staged.element_size())
        return Result(tensor, traffic=Traffic(moved, moved, num_messages=1))

    def _fold(self, comm: MPI.Comm, tensor: torch.Tensor) -> Steps[Result]:
        flat = tensor.detach().view(-1)
        staged, kind = _addable(flat)
        bounds = shard_bounds(flat.numel(), self._size)
        counts = _counts(bounds)
        own = torch.empty(counts[self._rank], dtype=staged.dtype)
        yield from self._call(
            comm, "Reduce_scatter", [memory(staged), kind], [memory(own), kind], counts
        )
        flat[bounds[self._rank] : bounds[self._rank + 1]].copy_(own)
        moved = self._share(staged.numel() * staged.element_size())
        return Result(tensor, traffic=Traffic(moved, moved, num_messages=1))

    def _spread(self, comm: MPI.Comm, tensor: torch.Tensor) -> Steps[Result]:
        flat = tensor.detach().view(-1)
        counts = _counts(shard_bounds(flat.numel(), self._size))
        yield from self._call(
            comm, "Allgatherv", MPI.IN_PLACE, [memory(flat), counts, moved_as(flat.dtype)]
        )
        moved = self._share(flat.numel() * flat.element_size())
        return Result(tensor, traffic=Traffic(moved, moved, num_messages=1))

    def _all_gather(self, comm: MPI.Comm, tensor: torch.Tensor) -> Steps[Result]:
        mine = tensor.detach()
        head = head_of(mine)
        heads = torch.empty(self._size, HEAD_ELEMENTS, dtype=torch.int64)
        yield from self._call(
            comm, "Allgather", [memory(head), MPI.INT64_T], [memory(heads), MPI.INT64_T]
        )
        sizes = sizes_from(heads)
        together = torch.empty(sum(sizes), dtype=mine.dtype)
        kind = moved_as(mine.dtype)
        yield from self._call(
            comm, "Allgatherv", [memory(mine), kind], [memory(together), sizes, kind]
        )
        width = mine.element_size()
        traffic = Traffic(
            sent_bytes=(self._size - 1) * mine.numel() * width,
            received_bytes=(sum(sizes) - mine.numel()) * width,
            header_bytes=(self._size - 1) * head.numel() * head.element_size(),
            num_messages=2,
        )
        return Result(tensor, parts_of(together, sizes), traffic)

    def _all_to_all(self, comm: MPI.Comm, parts: Sequence[torch.Tensor]) -> Steps[Result]:
        heads = torch.stack([head_of(part) for part in parts])
        theirs = torch.empty_like(heads)
        yield from self._call(
            comm, "Alltoall", [memory(heads), MPI.INT64_T], [memory(theirs), MPI.INT64_T]
        )
        sizes = sizes_from(theirs)
        given = torch.cat([part.detach() for part in parts])
        together = torch.empty(sum(sizes), dtype=given.dtype)
        kind = moved_as(given.dtype)
        yield from self._call(
            comm,
            "Alltoallv",
            [memory(given), [part.numel() for part in parts], kind],
            [memory(together), sizes, kind],
        )
        traffic = traffic_of_parts(heads, theirs, self._rank)
        return Result(parts=parts_of(together, sizes), traffic=traffic)

    def _broadcast(self, comm: MPI.Comm, tensor: torch.Tensor, root: int) -> Steps[Result]:
        flat = tensor.detach().view(-1)
        yield from self._call(comm, "Bcast", [memory(flat), moved_as(flat.dtype)], root)
        moved = flat.numel() * flat.element_size() if self._size > 1 else 0
        is_root = self._rank == root
        return Result(tensor, traffic=Traffic(moved * is_root, moved * (not is_root), 0, 0, 1))

    def _barrier(self, comm: MPI.Comm) -> Steps[Result]:
        yield from self._call(comm, "Barrier")
        return Result(traffic=Traffic(num_messages=1))

    def _share(self, num_bytes: int) -> int:
        return num_bytes * (self._size - 1) // self._size


def _addable(flat: torch.Tensor) -> tuple[torch.Tensor, MPI.Datatype]:
    """The tensor itself, or a float32 copy where MPI cannot add its dtype."""
    kind = _SUMMED_AS.get(flat.dtype)
    return (flat, kind) if kind is not None else (flat.float(), MPI.FLOAT)


def _counts(bounds: Sequence[int]) -> list[int]:
    return [end - begin for begin, end in itertools.pairwise(bounds)]
