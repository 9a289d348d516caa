"""The `mpi-ring` backend's collectives: which algorithm takes which request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpi4py import MPI

from testbed.backends.mpi.channel import RingChannel
from testbed.backends.mpi.delivering import deliver
from testbed.backends.mpi.patience import Patience
from testbed.backends.mpi.steps import Steps
from testbed.backends.mpi.switch import measure_switch
from testbed.backends.mpi.two_level import Groups
from testbed.nouns import Combined, Request, Verb


class RingCollectives:
    """Sums by ring or recursive doubling; everything else by flows and chains.

    Args:
        comms: one communicator per channel.
        segment_bytes: size of a message of the ring.
        groups: ranks of each host; a single group is a flat ring.
        switch_bytes: sums up to this size go by recursive doubling; None = measure it now.
        patience: how to wait while measuring.
    """

    def __init__(
        self,
        comms: Sequence[MPI.Comm],
        segment_bytes: int,
        groups: Groups,
        switch_bytes: int | None,
        patience: Patience,
    ) -> None:
        self._channels = [RingChannel(comm, segment_bytes, groups) for comm in comms]
        self.switch_bytes = (
            measure_switch(self._channels[0], patience) if switch_bytes is None else switch_bytes
        )

    def steps(self, request: Request, nearly: Callable[[], None]) -> Steps[Combined]:
        """See `Collectives.steps`."""
        channel, tensor = self._channels[request.channel], request.tensor
        if request.verb == Verb.DELIVER:
            return deliver(channel.comm, request.parts)
        if tensor is None:
            return channel.barrier()
        if request.verb == Verb.BROADCAST:
            return channel.broadcast(tensor, request.root)
        if request.verb == Verb.GATHER:
            return channel.gather(tensor)
        if request.verb == Verb.SUM and request.num_bytes <= self.switch_bytes:
            return channel.doubling(tensor)
        return channel.ring(tensor, request.verb, nearly)

    def free(self) -> None:
        """See `Collectives.free`."""
        for channel in self._channels:
            channel.free()
