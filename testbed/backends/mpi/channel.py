"""The collectives of `mpi-ring`: on one channel, and which algorithm takes which request."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from mpi4py import MPI

from testbed.backends.mpi.backoff import Backoff
from testbed.backends.mpi.flow import (
    Doubling,
    Flow,
    Groups,
    chain_flow,
    choose_switch,
    cut,
    plan_doubling,
    ring_flow,
    sum_flows,
)
from testbed.backends.mpi.gather import Frames, all_to_all, parts_of, sizes_from
from testbed.backends.mpi.loop import Steps, complete
from testbed.backends.mpi.ring import (
    PersistentCache,
    PersistentDoubling,
    PersistentFlow,
    Staging,
    run_doubling,
    run_flow,
)
from testbed.base.types import AT_ONCE_BYTES, Op, Request, Result, Traffic


class PersistentFlows:
    """Flows that run one after the other on the same tensor."""

    def __init__(self, flows: Sequence[PersistentFlow]) -> None:
        self.flows = flows
        self.traffic = sum((flow.traffic for flow in flows), Traffic())

    @property
    def requests(self) -> list[MPI.Prequest]:
        """All persistent requests."""
        return [request for flow in self.flows for request in flow.requests]


class RingChannel:
    """The collectives of one channel, each as a generator; one at a time may be under way.

    Args:
        comm: a communicator that nothing else uses.
        segment_bytes: size of a message.
        groups: ranks of each host; a single group is a flat ring.
    """

    def __init__(self, comm: MPI.Comm, segment_bytes: int, groups: Groups) -> None:
        self.comm = comm
        self._rank, self._size = comm.Get_rank(), comm.Get_size()
        self._groups = groups
        self._staging = Staging(segment_bytes)
        self._rings: PersistentCache[PersistentFlows] = PersistentCache()
        self._doublings: PersistentCache[PersistentDoubling] = PersistentCache()
        self._doubling: Doubling = plan_doubling(self._rank, self._size)
        self._slots = torch.empty(0, dtype=torch.uint8)
        self._frames: Frames | None = None
        self._token = torch.zeros(1, dtype=torch.uint8)

    def ring(
        self, tensor: torch.Tensor, op: Op, about_to_end: Callable[[], None] | None = None
    ) -> Steps[Result]:
        """ALL_REDUCE, FOLD or SPREAD by the segmented ring, in place.

        Args:
            tensor: of every rank.
            op: which of them.
            about_to_end: called once when the last segments are on their way.
        """
        flat = tensor.detach().view(-1)
        segment = self._segment(flat.dtype)
        bound = self._rings.get(
            (flat.data_ptr(), flat.numel(), flat.dtype, op, 0),
            lambda: self._persistent(
                sum_flows(self._groups, self._rank, flat.numel(), segment, op), flat
            ),
        )
        for flow in bound.flows[:-1]:
            yield from run_flow(flow, flat, self._staging)
        for flow in bound.flows[-1:]:
            yield from run_flow(flow, flat, self._staging, about_to_end)
        return Result(tensor, traffic=bound.traffic)

    def doubling(self, tensor: torch.Tensor) -> Steps[Result]:
        """ALL_REDUCE by recursive doubling, in place."""
        flat = tensor.detach().view(-1)
        if flat.numel() == 0:
            return Result(tensor)
        self._grow_slots(flat.numel() * flat.element_size())
        bound = self._doublings.get(
            (flat.data_ptr(), flat.numel(), flat.dtype),
            lambda: PersistentDoubling(self._doubling, self.comm, flat, self._slots_like(flat)),
        )
        yield from run_doubling(bound, flat)
        return Result(tensor, traffic=bound.traffic)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Steps[Result]:
        """The root's tensor goes along a chain of segments."""
        flat = tensor.detach().view(-1)
        spans = cut((0, flat.numel()), self._segment(flat.dtype))
        bound = self._rings.get(
            (flat.data_ptr(), flat.numel(), flat.dtype, Op.BROADCAST, root),
            lambda: self._persistent((chain_flow(self._rank, self._size, root, spans),), flat),
        )
        yield from run_flow(bound.flows[0], flat, self._staging)
        return Result(tensor, traffic=bound.traffic)

    def barrier(self) -> Steps[Result]:
        """A sum of one byte, whose result is not used."""
        token = yield from self.doubling(self._token)
        return Result(traffic=_as_header(token.traffic))

    def all_gather(self, tensor: torch.Tensor) -> Steps[Result]:
        """The tensors of all ranks, which may differ in size.

        Sizes, dtypes and short tensors go to all ranks at once; then long tensors go around.

        Raises:
            Disagreement: the ranks gave different dtypes.
        """
        mine = tensor.detach()
        frames = self._frames = self._frames or Frames(self.comm)
        yield from frames.exchange(mine)
        sizes = sizes_from(frames.heads())
        together = torch.empty(sum(sizes), dtype=mine.dtype)
        parts = parts_of(together, sizes)
        frames.copy_to(parts)
        traffic = frames.traffic(parts)
        if any(part.numel() * part.element_size() > AT_ONCE_BYTES for part in parts):
            parts[self._rank].copy_(mine)
            traffic += yield from self._go_round(together, sizes)
        return Result(tensor, parts, traffic)

    def free(self) -> None:
        """Give all persistent requests back; nothing may be in flight."""
        self._rings.clear()
        self._doublings.clear()
        if self._frames is not None:
            self._frames.free()
            self._frames = None

    def _go_round(self, flat: torch.Tensor, sizes: Sequence[int]) -> Steps[Traffic]:
        """Spread the rank's own part of `flat`, whose parts have these sizes; only long ones go."""
        segment = self._segment(flat.dtype)
        ends = itertools.accumulate(sizes)
        spans = [
            (end - n if n * flat.element_size() > AT_ONCE_BYTES else end, end)
            for end, n in zip(ends, sizes, strict=True)
        ]
        chunks = [cut(span, segment) for span in spans]
        flow = ring_flow(range(self._size), self._rank, chunks, fold=False)
        bound = PersistentFlow(flow, self.comm, flat, self._staging)
        yield from run_flow(bound, flat, self._staging)
        bound.free()  # this memory is new each time: not worth keeping
        return bound.traffic

    def _persistent(self, flows: Sequence[Flow], flat: torch.Tensor) -> PersistentFlows:
        return PersistentFlows(
            [PersistentFlow(flow, self.comm, flat, self._staging) for flow in flows]
        )

    def _segment(self, dtype: torch.dtype) -> int:
        return max(1, self._staging.segment_bytes // dtype.itemsize)

    def _grow_slots(self, num_bytes: int) -> None:
        wanted = self._doubling.num_received * _aligned(num_bytes)
        if wanted > self._slots.numel():
            self._doublings.clear()  # they point into the old slots
            self._slots = torch.empty(wanted, dtype=torch.uint8)

    def _slots_like(self, flat: torch.Tensor) -> list[torch.Tensor]:
        num_bytes = flat.numel() * flat.element_size()
        stride = _aligned(num_bytes)
        return [
            self._slots[i * stride : i * stride + num_bytes].view(flat.dtype)
            for i in range(self._doubling.num_received)
        ]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 64) * 64


def _as_header(traffic: Traffic) -> Traffic:
    return Traffic(header_bytes=traffic.sent_bytes, num_messages=traffic.num_messages)


# Finds by measuring up to which size recursive doubling is faster than the ring.

TRIED_BYTES = (16 << 10, 64 << 10, 256 << 10, 1 << 20)
IN_ROW = 6


def measure_switch(channel: RingChannel, backoff: Backoff, num_repeats: int = 5) -> int:
    """Bytes up to which recursive doubling is the faster one here.

    Rank 0's medians decide for all ranks, which must switch at the same size. Sizes above the first
    at which the ring is faster would change nothing, and are not sent: at 50 Mbit/s they take most
    of a minute.
    """
    if channel.comm.Get_size() == 1:
        return 0

    def timing(num_bytes: int) -> tuple[int, float, float]:
        tensor = torch.zeros(num_bytes // 4)

        def by_doubling() -> Steps[Result]:
            return channel.doubling(tensor)

        def by_ring() -> Steps[Result]:
            return channel.ring(tensor, Op.ALL_REDUCE)

        doubling_s, ring_s = _medians_s((by_doubling, by_ring), backoff, num_repeats)
        channel.free()  # its requests hold addresses of a tensor that ends here
        mine = num_bytes, doubling_s, ring_s
        first: tuple[int, float, float] = channel.comm.bcast(mine, root=0)
        return first

    return choose_switch(map(timing, TRIED_BYTES))


def _medians_s(
    candidates: Sequence[Callable[[], Steps[Result]]], backoff: Backoff, num_repeats: int
) -> list[float]:
    """Median seconds of each candidate, run in turn so that a disturbance meets all of them."""
    samples: list[list[float]] = [[] for _ in candidates]
    for repeat in range(num_repeats + 1):
        for begin, into in zip(candidates, samples, strict=True):
            start_s = time.perf_counter()
            # In a row, as in a training step: after a pause, with all buffers empty, a single sum
            # takes less time than it does there.
            for _ in range(IN_ROW):
                complete(begin(), backoff)
            if repeat > 0:  # the first one makes the requests and touches the memory
                into.append(time.perf_counter() - start_s)
    return [statistics.median(s) for s in samples]


# Which algorithm takes which request.


class RingCollectives:
    """Sums by ring or recursive doubling; everything else by flows and chains.

    Args:
        comms: one communicator per channel.
        segment_bytes: size of a message of the ring.
        groups: ranks of each host; a single group is a flat ring.
        switch_bytes: sums up to this size go by recursive doubling; None = measure it now.
        backoff: how to wait while measuring.
    """

    def __init__(
        self,
        comms: Sequence[MPI.Comm],
        segment_bytes: int,
        groups: Groups,
        switch_bytes: int | None,
        backoff: Backoff,
    ) -> None:
        self._channels = [RingChannel(comm, segment_bytes, groups) for comm in comms]
        self.switch_bytes = (
            measure_switch(self._channels[0], backoff) if switch_bytes is None else switch_bytes
        )

    def steps(self, request: Request, about_to_end: Callable[[], None]) -> Steps[Result]:
        """See `Collectives.steps`."""
        channel, tensor = self._channels[request.channel], request.tensor
        if request.op == Op.ALL_TO_ALL:
            return all_to_all(channel.comm, request.parts)
        if tensor is None:
            return channel.barrier()
        if request.op == Op.BROADCAST:
            return channel.broadcast(tensor, request.root)
        if request.op == Op.ALL_GATHER:
            return channel.all_gather(tensor)
        if request.op == Op.ALL_REDUCE and request.num_bytes <= self.switch_bytes:
            return channel.doubling(tensor)
        return channel.ring(tensor, request.op, about_to_end)

    def free(self) -> None:
        """See `Collectives.free`."""
        for channel in self._channels:
            channel.free()
