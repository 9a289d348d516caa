"""Runs what `flow.py` plans, over persistent requests; segments are added as they arrive."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

import torch
from mpi4py import MPI

from testbed.backends.mpi.flow import Doubling, Flow
from testbed.backends.mpi.loop import Steps, memory
from testbed.base.types import Traffic

# Persistent MPI requests, made once for a place in memory and started each time it is used again.
#
# Training sends the same buckets from the same memory in every step, so that posting a message
# costs one `MPI_Start` instead of a new request.


class Persistent(Protocol):
    """Anything that holds persistent requests."""

    @property
    def requests(self) -> list[MPI.Prequest]:
        """All of them; none in flight when they are freed."""
        ...


P = TypeVar("P", bound=Persistent)


class PersistentCache(Generic[P]):
    """What one channel used most recently, bounded by the number of persistent requests.

    The entries hold addresses, not tensors, so a tensor that is dropped is really freed; memory
    that comes back at the same address with the same size fits the old entry.
    """

    def __init__(self, max_requests: int = 1 << 15) -> None:
        self._max_requests = max_requests
        self._entries: OrderedDict[Hashable, P] = OrderedDict()
        self._num_requests = 0

    def get(self, key: Hashable, make: Callable[[], P]) -> P:
        """The entry of this key, made if need be; the least recently used ones make room."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
            return entry
        entry = self._entries[key] = make()
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


TAG, DOUBLING_TAG = 1, 2


class Staging:
    """Receive buffers of segments that must be added: a few slots of one segment, used in turn.

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


class PersistentFlow:
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
    bound: PersistentFlow,
    flat: torch.Tensor,
    staging: Staging,
    about_to_end: Callable[[], None] | None = None,
) -> Steps[None]:
    """Move and add the segments of one flow, in place.

    Receives are posted a few arrivals ahead. Where an arrival overwrites a span that this rank has
    sent before, it is posted only after that send; this cannot deadlock, because every rank posts
    and consumes all arrivals that it adds before it consumes any that overwrite.
    """
    flow, sends, receives = bound.flow, bound.sends, bound.receives
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
        if index == early and about_to_end is not None:
            about_to_end()
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


# Recursive doubling.


class PersistentDoubling:
    """A rank's part bound to the memory of one tensor by persistent requests.

    Args:
        plan: the ranks to exchange with.
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
            comm.Recv_init([memory(slot), MPI.BYTE], source, DOUBLING_TAG)
            for slot, source in zip(slots, sources, strict=True)
        ]
        self.sends = [comm.Send_init(own, partner, DOUBLING_TAG) for partner in plan.partners]
        self.gives = [] if plan.taker is None else [comm.Send_init(own, plan.taker, DOUBLING_TAG)]
        self.results = [] if plan.taker is None else [comm.Recv_init(own, plan.taker, DOUBLING_TAG)]
        self.returns = [] if plan.giver is None else [comm.Send_init(own, plan.giver, DOUBLING_TAG)]
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


def run_doubling(bound: PersistentDoubling, flat: torch.Tensor) -> Steps[None]:
    """Sum in place; both partners of an exchange compute a + b of the same a and b.

    Addition commutes bit for bit, so all ranks end with the same bits although each one has its own
    values on the left.
    """
    receives, slots = bound.receives, bound.slots
    if receives:
        MPI.Prequest.Startall(receives)
    for give in bound.gives:
        give.Start()
        yield give
    for result in bound.results:
        result.Start()
        yield result
    first = len(bound.returns)
    for index, receive in enumerate(receives):
        send = bound.sends[index - first] if index >= first else None
        if send is not None:
            send.Start()
        yield receive
        if send is not None:
            yield send  # its memory is about to change
        flat.add_(slots[index])
    for giving_back in bound.returns:
        giving_back.Start()
        yield giving_back
