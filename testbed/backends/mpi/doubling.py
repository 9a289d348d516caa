"""Recursive doubling: log2(n) exchanges of the whole tensor, for sums where latency is all."""

from __future__ import annotations

import torch
from mpi4py import MPI

from testbed.backends.mpi.doubling_plan import Doubling
from testbed.backends.mpi.dtypes import memory
from testbed.backends.mpi.steps import Steps
from testbed.nouns import Traffic

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
