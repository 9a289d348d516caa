"""Runs the flows that `flow.py` plans: segments over persistent requests, added as they arrive."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

import torch
from mpi4py import MPI

from testbed.backends.mpi.dtypes import memory
from testbed.backends.mpi.flow import Flow
from testbed.backends.mpi.loop import Steps
from testbed.base.types import Traffic

# Persistent MPI requests, made once for a place in memory and started each time it is used again.
#
# Training sends the same buckets from the same memory in every step, so that posting a message
# costs one `MPI_Start` instead of a new request.


class Armed(Protocol):
    """Anything that holds persistent requests."""

    @property
    def requests(self) -> list[MPI.Prequest]:
        """All of them; none in flight when they are freed."""
        ...


A = TypeVar("A", bound=Armed)


class ArmedCache(Generic[A]):
    """The most recently used armed plans of one channel, bounded by their number of requests.

    The entries hold addresses, not tensors, so a tensor that is dropped is really freed; memory
    that comes back at the same address with the same size fits the old entry.
    """

    def __init__(self, max_requests: int = 1 << 15) -> None:
        self._max_requests = max_requests
        self._entries: OrderedDict[Hashable, A] = OrderedDict()
        self._num_requests = 0

    def get(self, key: Hashable, arm: Callable[[], A]) -> A:
        """The entry of this key, made if need be; the least recently used ones make room."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
            return entry
        entry = self._entries[key] = arm()
        self._num_requests += len(entry.requests)
        while self._num_requests > self._max_requests and len(self._entries) > 1:
            _, oldest = self._entries.popitem(last=False)
            self._num_requests -= len(oldest.requests)
            free_all(oldest.requests)
        return entry

    def clear(self) -> None:
        """Free all; nothing may be in flight."""
        for entry in self._entries.values():
            free_all(entry.requests)
        self._entries.clear()
        self._num_requests = 0

    def __len__(self) -> int:
        return len(self._entries)


def free_all(requests: list[MPI.Prequest]) -> None:
    """Give persistent requests back to MPI."""
    for request in requests:
        request.Free()


TAG = 1


class Staging:
    """Where segments land that must be added: a few slots of one segment, used in turn.

    While one slot is being added, the messages for the others are already posted. Few slots, so
    that what arrives is still in the cache when it is added.
    """

    def __init__(self, segment_bytes: int, num_slots: int = 2) -> None:
        self.segment_bytes = segment_bytes
        self.num_slots = num_slots
        self._bytes = torch.empty(segment_bytes * num_slots, dtype=torch.uint8)

    def slot(self, index: int) -> torch.Tensor:
        """The bytes of the slot that the index-th arrival of a flow uses."""
        begin = (index % self.num_slots) * self.segment_bytes
        return self._bytes[begin : begin + self.segment_bytes]

    def slots(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """All slots as elements of a dtype."""
        usable = self.segment_bytes - self.segment_bytes % dtype.itemsize
        return [self.slot(i)[:usable].view(dtype) for i in range(self.num_slots)]


class ArmedFlow:
    """A flow bound to the memory of one tensor by persistent requests.

    Args:
        flow: what to do.
        comm: the channel's communicator.
        flat: the tensor, one-dimensional; only its address is kept.
        staging: slots for what must be added.
    """

    def __init__(self, flow: Flow, comm: MPI.Comm, flat: torch.Tensor, staging: Staging) -> None:
        self.flow = flow
        width = flat.element_size()
        self.sends = [
            comm.Send_init([memory(flat[begin:end]), MPI.BYTE], flow.right, TAG)
            for begin, end in flow.sends
        ]
        self.receives = [
            comm.Recv_init(
                [
                    memory(
                        staging.slot(index)[: (a.end - a.begin) * width]
                        if a.reduce
                        else flat[a.begin : a.end]
                    ),
                    MPI.BYTE,
                ],
                flow.left,
                TAG,
            )
            for index, a in enumerate(flow.arrivals)
        ]
        self.traffic = Traffic(
            sent_bytes=sum(end - begin for begin, end in flow.sends) * width,
            received_bytes=sum(a.end - a.begin for a in flow.arrivals) * width,
            num_messages=len(self.sends),
        )

    @property
    def requests(self) -> list[MPI.Prequest]:
        """All persistent requests."""
        return self.sends + self.receives

    def free(self) -> None:
        """Give the requests back; nothing may be in flight."""
        free_all(self.requests)


LAST_ARRIVALS = 2


def run_flow(
    armed: ArmedFlow,
    flat: torch.Tensor,
    staging: Staging,
    nearly: Callable[[], None] | None = None,
) -> Steps[None]:
    """Move and add the segments of one flow, in place.

    Receives are posted a few arrivals ahead. Where an arrival overwrites a span that this rank has
    sent before, it is posted only after that send; this cannot deadlock, because every rank posts
    and consumes all arrivals that it adds before it consumes any that overwrite.
    """
    flow, sends, receives = armed.flow, armed.sends, armed.receives
    arrivals, depth = flow.arrivals, staging.num_slots
    slots = staging.slots(flat.dtype) if arrivals and arrivals[0].reduce else []
    posted = 0
    while posted < min(depth, len(arrivals)) and arrivals[posted].after is None:
        receives[posted].Start()
        posted += 1
    num_sent = len(flow.first)
    if num_sent:
        MPI.Prequest.Startall(sends[:num_sent])
    early = len(arrivals) - LAST_ARRIVALS if len(arrivals) > 2 * LAST_ARRIVALS else None
    for index, arrival in enumerate(arrivals):
        if index == early and nearly is not None:
            nearly()
        while posted < min(index + depth, len(arrivals)):
            after = arrivals[posted].after
            if after is not None:
                yield sends[after]
            receives[posted].Start()
            posted += 1
        yield receives[index]
        if arrival.reduce:
            begin, end = arrival.begin, arrival.end
            flat[begin:end].add_(slots[index % depth][: end - begin])
        if arrival.forward:
            sends[num_sent].Start()
            num_sent += 1
    yield from sends
