"""All-gather of short tensors, and all-to-all: only the sender knows the sizes.

In an all-gather each rank sends size, dtype and, if they are short, values to all others at once.
Around a ring the sizes would go first, and both would take a hop for each rank; where tensors are
short, hops are all that an all-gather costs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mpi4py import MPI

from testbed.backends.checks import NUMBERED, one_dtype
from testbed.backends.mpi.loop import Steps, memory
from testbed.backends.mpi.ring import free_all
from testbed.base.types import AT_ONCE_BYTES, Result, Traffic

# The header that each rank sends before tensors of unequal sizes.

HEAD_ELEMENTS = 2  # number of elements, place of the dtype in NUMBERED


def moved_as(dtype: torch.dtype) -> MPI.Datatype:
    """A type of the same width, for moving without adding (counts stay below 2^31 longer)."""
    return {1: MPI.INT8_T, 2: MPI.INT16_T, 4: MPI.INT32_T, 8: MPI.INT64_T}[dtype.itemsize]


def head_of(tensor: torch.Tensor) -> torch.Tensor:
    """Size and dtype of a rank's tensor, as two int64."""
    return torch.tensor([tensor.numel(), NUMBERED.index(tensor.dtype)])


def sizes_from(heads: torch.Tensor) -> list[int]:
    """Number of elements of every rank, from the heads of all ranks (n x 2).

    Raises:
        Disagreement: the ranks gave different dtypes.

    Example:
        >>> sizes_from(torch.tensor([[3, 0], [5, 0]]))
        [3, 5]
    """
    one_dtype([NUMBERED[int(code)] for code in heads[:, 1]])
    return [int(size) for size in heads[:, 0]]


def parts_of(together: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Views of the parts that lie one after the other in `together`."""
    parts: list[torch.Tensor] = []
    begin = 0
    for size in sizes:
        parts.append(together[begin : begin + size])
        begin += size
    return tuple(parts)


TAG = 5
HEAD_BYTES = HEAD_ELEMENTS * 8


class Frames:
    """One channel's memory for a frame of each rank; its receives are persistent.

    A frame is the head of a tensor, and the tensor itself if it has at most `AT_ONCE_BYTES`.

    Args:
        comm: a communicator on which nothing else uses `TAG`.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm, self._rank, self._size = comm, comm.Get_rank(), comm.Get_size()
        self._frames = torch.empty(self._size, HEAD_BYTES + AT_ONCE_BYTES, dtype=torch.uint8)
        self._others = [(self._rank + d) % self._size for d in range(1, self._size)]
        self._receives = [
            comm.Recv_init([memory(self._frames[r]), MPI.BYTE], r, TAG) for r in self._others
        ]

    def exchange(self, mine: torch.Tensor) -> Steps[None]:
        """Send this rank's frame to all others; theirs lie here until the next exchange.

        No rank waits until others have posted their receives: MPI keeps the frames of one rank in
        order, so that a rank may be one exchange ahead.
        """
        width = mine.numel() * mine.element_size()
        held = width if width <= AT_ONCE_BYTES else 0
        frame = self._frames[self._rank][: HEAD_BYTES + held]
        frame[:HEAD_BYTES] = head_of(mine).view(torch.uint8)
        if held:
            frame[HEAD_BYTES:] = mine.view(torch.uint8)
        if self._receives:
            MPI.Prequest.Startall(self._receives)
        sends = [self._comm.Isend([memory(frame), MPI.BYTE], r, TAG) for r in self._others]
        yield from self._receives
        yield from sends

    def heads(self) -> torch.Tensor:
        """Size and dtype of each rank's tensor (n x 2), see `head_of`."""
        return self._frames[:, :HEAD_BYTES].contiguous().view(torch.int64)

    def copy_to(self, parts: Sequence[torch.Tensor]) -> None:
        """Fill each rank's part, if its frame held it."""
        for rank, part in enumerate(parts):
            width = part.numel() * part.element_size()
            if width and width <= AT_ONCE_BYTES:
                frame = self._frames[rank][HEAD_BYTES : HEAD_BYTES + width]
                part.view(torch.uint8).copy_(frame)

    def traffic(self, parts: Sequence[torch.Tensor]) -> Traffic:
        """What the exchange moved; heads count as headers."""
        held = [part.numel() * part.element_size() for part in parts]
        held = [width if width <= AT_ONCE_BYTES else 0 for width in held]
        fan = len(self._others)
        return Traffic(
            sent_bytes=fan * held[self._rank],
            received_bytes=sum(held) - held[self._rank],
            header_bytes=fan * HEAD_BYTES,
            num_messages=fan,
        )

    def free(self) -> None:
        """Give the receives back; none may be in flight."""
        free_all(self._receives)
        self._receives = []


# All-to-all by messages between pairs: sizes and dtypes first, then what is not empty.

HEAD_TAG, PART_TAG = 3, 4


def all_to_all(comm: MPI.Comm, parts: Sequence[torch.Tensor]) -> Steps[Result]:
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
    theirs = heads.clone()  # the row of this rank is not received
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
    return Result(parts=arrived, traffic=traffic_of_parts(heads, theirs, rank))


def traffic_of_parts(heads: torch.Tensor, theirs: torch.Tensor, rank: int) -> Traffic:
    """Bytes of the parts for and from others; their heads count as headers.

    Args:
        heads: (n x 2) size and dtype of what goes to each rank.
        theirs: (n x 2) of what comes from each.
        rank: this rank, whose own part is not sent.
    """
    sent, received = (sum(sizes_from(h)) - int(h[rank, 0]) for h in (heads, theirs))
    width = NUMBERED[int(heads[rank, 1])].itemsize
    num_others = len(heads) - 1
    num_messages = num_others + sum(int(n) > 0 for r, n in enumerate(heads[:, 0]) if r != rank)
    head_bytes = num_others * HEAD_ELEMENTS * heads.element_size()
    return Traffic(sent * width, received * width, head_bytes, num_messages=num_messages)
