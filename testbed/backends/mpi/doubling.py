"""Recursive doubling: log2(n) exchanges of the whole tensor, for sums where latency is all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from mpi4py import MPI

from testbed.backends.mpi.dtypes import memory
from testbed.backends.mpi.loop import Steps
from testbed.base.types import Traffic

# Pure planning of recursive doubling: whom a rank meets, and up to which size it is worth it.
#
# With n not a power of two, the first 2 (n - p) ranks (p the largest power of two below n) pair up
# before: the even one gives its values to the odd one and gets the result from it at the end.


@dataclass(frozen=True, slots=True)
class Doubling:
    """One rank's part.

    Attributes:
        partners: ranks with which it exchanges and adds, in order.
        giver: the rank whose values it adds first and that gets the result at the end.
        taker: the rank to which it gives its values; it then only waits for the result.
    """

    partners: tuple[int, ...] = ()
    giver: int | None = None
    taker: int | None = None

    @property
    def num_received(self) -> int:
        """Messages that must be added, each in a slot of its own."""
        return len(self.partners) + (self.giver is not None)


def plan_doubling(rank: int, size: int) -> Doubling:
    """Whom a rank meets.

    Example:
        >>> plan_doubling(1, 3)
        Doubling(partners=(2,), giver=0, taker=None)
        >>> plan_doubling(0, 3).taker, plan_doubling(2, 4).partners
        (1, (3, 0))

    Source:
        Thakur, Rabenseifner and Gropp, 2005, Int. J. High Perform. Comput. Appl.
    """
    power = 1 << (size.bit_length() - 1)
    extra = size - power
    if rank < 2 * extra and rank % 2 == 0:
        return Doubling(taker=rank + 1)
    place = rank // 2 if rank < 2 * extra else rank - extra
    others = [place ^ (1 << bit) for bit in range(power.bit_length() - 1)]
    partners = tuple(2 * other + 1 if other < extra else other + extra for other in others)
    return Doubling(partners, giver=rank - 1 if rank < 2 * extra else None)


def choose_switch(timings: Sequence[tuple[int, float, float]], at_least: int = 4096) -> int:
    """The largest size below which doubling was never slower.

    Args:
        timings: (num_bytes, seconds by doubling, seconds by ring), sizes ascending.
        at_least: bytes up to which doubling is taken unmeasured: there only the number of
            messages counts, log2(n) against 2 (n - 1).

    Example:
        >>> choose_switch([(16384, 3e-5, 4e-5), (65536, 9e-5, 5e-5)])
        16384
    """
    best = at_least
    for num_bytes, doubling_s, ring_s in timings:
        if doubling_s > ring_s:
            break
        best = num_bytes
    return best


TAG = 2


class ArmedDoubling:
    """A rank's part bound to the memory of one tensor by persistent requests.

    Args:
        plan: whom to meet.
        comm: the channel's communicator.
        flat: the tensor, one-dimensional; only its address is kept.
        slots: `plan.num_received` tensors like `flat`, for what must be added.
    """

    def __init__(
        self, plan: Doubling, comm: MPI.Comm, flat: torch.Tensor, slots: list[torch.Tensor]
    ) -> None:
        own = [memory(flat), MPI.BYTE]
        self.slots = slots
        sources = ([plan.giver] if plan.giver is not None else []) + list(plan.partners)
        self.receives = [
            comm.Recv_init([memory(slot), MPI.BYTE], source, TAG)
            for slot, source in zip(slots, sources, strict=True)
        ]
        self.sends = [comm.Send_init(own, partner, TAG) for partner in plan.partners]
        self.gives = [] if plan.taker is None else [comm.Send_init(own, plan.taker, TAG)]
        self.results = [] if plan.taker is None else [comm.Recv_init(own, plan.taker, TAG)]
        self.returns = [] if plan.giver is None else [comm.Send_init(own, plan.giver, TAG)]
        num_bytes = flat.numel() * flat.element_size()
        num_messages = len(self.sends) + len(self.gives) + len(self.returns)
        num_received = len(self.receives) + len(self.results)
        self.traffic = Traffic(
            num_messages * num_bytes, num_received * num_bytes, num_messages=num_messages
        )

    @property
    def requests(self) -> list[MPI.Prequest]:
        """All persistent requests."""
        return self.receives + self.sends + self.gives + self.results + self.returns


def run_doubling(armed: ArmedDoubling, flat: torch.Tensor) -> Steps[None]:
    """Sum in place; both partners of an exchange compute a + b of the same a and b.

    Addition commutes bit for bit, so all ranks end with the same bits although each one has its own
    values on the left.
    """
    receives, slots = armed.receives, armed.slots
    if receives:
        MPI.Prequest.Startall(receives)
    for give in armed.gives:
        give.Start()
        yield give
    for result in armed.results:
        result.Start()
        yield result
    first = len(armed.returns)
    for index, receive in enumerate(receives):
        send = armed.sends[index - first] if index >= first else None
        if send is not None:
            send.Start()
        yield receive
        if send is not None:
            yield send  # its memory is about to change
        flat.add_(slots[index])
    for giving_back in armed.returns:
        giving_back.Start()
        yield giving_back
