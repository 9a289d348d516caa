"""The ring all-reduce as the papers draw it: whole chunks, one blocking exchange per hop.

The slow and obvious twin of `mpi-ring`; its segmented ring must give the same bits.
"""

from __future__ import annotations

import torch
from mpi4py import MPI

from testbed.backends.mpi.loop import memory
from testbed.base.types import shard_bounds


def plain_ring_sum(comm: MPI.Comm, tensor: torch.Tensor) -> None:
    """Replace every rank's tensor by the sum over ranks.

    Args:
        comm: the communicator; all of its ranks call this.
        tensor: contiguous CPU tensor of the same shape and dtype on all ranks, changed in place.

    Reference:
        Patarasuk and Yuan, 2009, J. Parallel Distrib. Comput.
    """
    plain_ring_fold(comm, tensor)
    plain_ring_spread(comm, tensor)


def plain_ring_fold(comm: MPI.Comm, tensor: torch.Tensor) -> None:
    """First sweep: rank r ends with the sum of shard r of `shard_bounds`."""
    rank, size = comm.Get_rank(), comm.Get_size()
    chunks = _chunks(tensor, size)
    for hop in range(size - 1):
        outgoing, own = chunks[(rank - hop - 1) % size], chunks[(rank - hop - 2) % size]
        received = torch.empty_like(own)
        _exchange(comm, outgoing, received)
        own.add_(received)


def plain_ring_spread(comm: MPI.Comm, tensor: torch.Tensor) -> None:
    """Second sweep: shard r of rank r comes into the tensors of all."""
    rank, size = comm.Get_rank(), comm.Get_size()
    chunks = _chunks(tensor, size)
    for hop in range(size - 1):
        _exchange(comm, chunks[(rank - hop) % size], chunks[(rank - hop - 1) % size])


def _chunks(tensor: torch.Tensor, size: int) -> list[torch.Tensor]:
    flat = tensor.detach().view(-1)
    bounds = shard_bounds(flat.numel(), size)
    return [flat[bounds[r] : bounds[r + 1]] for r in range(size)]


def _exchange(comm: MPI.Comm, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
    rank, size = comm.Get_rank(), comm.Get_size()
    comm.Sendrecv(
        [memory(outgoing), MPI.BYTE],
        dest=(rank + 1) % size,
        recvbuf=[memory(incoming), MPI.BYTE],
        source=(rank - 1) % size,
    )
