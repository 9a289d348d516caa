"""DELIVER by messages between pairs: sizes and dtypes first, then what is not empty."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mpi4py import MPI

from testbed.backends.mpi.dtypes import SUPPORTED, memory, moved_as
from testbed.backends.mpi.gathering import HEAD_ELEMENTS, head_of, parts_of, sizes_from
from testbed.backends.mpi.steps import Steps
from testbed.nouns import Combined, Traffic

HEAD_TAG, PART_TAG = 3, 4


def deliver(comm: MPI.Comm, parts: Sequence[torch.Tensor]) -> Steps[Combined]:
    """`parts[r]` goes to rank r; what each rank sent here comes back, in rank order.

    Each part crosses the network once, and a message that is not sent costs only its head of 16
    bytes. Everything is posted at once: the ranks need no order among themselves.

    Raises:
        Disagreement: the ranks gave different dtypes.
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    others = [(rank + distance) % size for distance in range(1, size)]
    given = [part.detach() for part in parts]
    heads = torch.stack([head_of(part) for part in given])
    theirs = heads.clone()  # the own row stays
    yield from (
        [comm.Irecv([memory(theirs[r]), MPI.INT64_T], r, HEAD_TAG) for r in others]
        + [comm.Isend([memory(heads[r]), MPI.INT64_T], r, HEAD_TAG) for r in others]
    )
    sizes = sizes_from(theirs)
    together = torch.empty(sum(sizes), dtype=given[rank].dtype)
    arrived = parts_of(together, sizes)
    kind = moved_as(together.dtype)
    messages = [
        comm.Irecv([memory(arrived[r]), kind], r, PART_TAG) for r in others if arrived[r].numel()
    ]
    messages += [
        comm.Isend([memory(given[r]), kind], r, PART_TAG) for r in others if given[r].numel()
    ]
    arrived[rank].copy_(given[rank])
    yield from messages
    return Combined(parts=arrived, traffic=delivered_traffic(heads, theirs, rank))


def delivered_traffic(heads: torch.Tensor, theirs: torch.Tensor, rank: int) -> Traffic:
    """Bytes of the parts for and from others; their heads count as headers.

    Args:
        heads: (n x 2) size and dtype of what goes to each rank.
        theirs: (n x 2) of what comes from each.
        rank: this rank, whose own part goes nowhere.
    """
    sent, received = (sum(sizes_from(h)) - int(h[rank, 0]) for h in (heads, theirs))
    width = SUPPORTED[int(heads[rank, 1])].itemsize
    num_others = len(heads) - 1
    num_messages = num_others + sum(int(n) > 0 for r, n in enumerate(heads[:, 0]) if r != rank)
    head_bytes = num_others * HEAD_ELEMENTS * heads.element_size()
    return Traffic(sent * width, received * width, head_bytes, num_messages=num_messages)
