"""GATHER of short tensors: each rank sends size, dtype and values to all others at once.

Around a ring the sizes would go first, and both would take a hop for each rank; where tensors are
short, hops are all that a gather costs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mpi4py import MPI

from testbed.backends.mpi.armed import free_all
from testbed.backends.mpi.dtypes import memory
from testbed.backends.mpi.gathering import HEAD_ELEMENTS, head_of
from testbed.backends.mpi.steps import Steps
from testbed.nouns import AT_ONCE_BYTES, Traffic

TAG = 5
HEAD_BYTES = HEAD_ELEMENTS * 8


class Frames:
    """One channel's memory for a frame of each rank; receives are armed once.

    A frame is the head of a tensor, and the tensor itself if it has at most `AT_ONCE_BYTES`.

    Args:
        comm: a communicator on which nobody else uses `TAG`.
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

        Nobody waits for the others' receives: MPI keeps the frames of one rank in order, so that a
        rank may be one exchange ahead.
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
