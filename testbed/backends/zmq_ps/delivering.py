"""A worker's half of DELIVER: parts go out by way of servers, parts from all others come in.

A part for rank r goes through server r (modulo the number of servers): with a server beside every
worker it crosses the network once, on its way up, and never leaves the host on its way down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from msgspec.structs import replace

from testbed.backends.zmq_ps.buffers import DTYPE_NAMES, Bytes, bytes_of
from testbed.backends.zmq_ps.exchanges import AnswersOfAnySize, Place, Ticket
from testbed.backends.zmq_ps.incoming import IncomingParts
from testbed.backends.zmq_ps.placement import place
from testbed.backends.zmq_ps.wire import Flag, Header
from testbed.nouns import Combined, Request


def relay_of(destination: int, num_servers: int) -> int:
    """The server through which a rank gets all its parts.

    Example:
        >>> [relay_of(rank, 2) for rank in range(4)]
        [0, 1, 0, 1]
    """
    return destination % num_servers


class DeliverExchange(AnswersOfAnySize):
    """One message at least for each other rank, an empty one if need be, and one that asks.

    In headers `root` is the rank that a part goes to, on the way back the one that it comes from.
    """

    def __init__(self, request: Request, ticket: Ticket, place_: Place) -> None:
        super().__init__(request, ticket, place_)
        dtype = DTYPE_NAMES[request.parts[place_.rank].dtype]
        self.header = replace(self.header, dtype=dtype, root=place_.rank)
        others = [rank for rank in range(place_.size) if rank != place_.rank]
        self._incoming = IncomingParts(others)
        # The question goes first: what is for this rank can come while its own parts leave.
        self._outgoing: list[tuple[int, Header, Bytes | None]] = [
            (relay_of(place_.rank, place_.num_servers), self.header, None)
        ]
        for rank in others:
            self._outgoing += self._slices(rank)
        self._unconfirmed = sum(
            elements is None or elements.size > 0 for _, _, elements in self._outgoing
        )

    def messages(self) -> Iterator[tuple[int, Header, Bytes | None]]:
        """See `Exchange.messages`; each says how many there are for its server."""
        counts = Counter(server for server, _, _ in self._outgoing)
        for server, header, elements in self._outgoing:
            yield server, replace(header, frame_count=counts[server]), elements

    def take(self, header: Header, payload: memoryview) -> bool:
        """A slice of a part for this rank, or the word that a message of ours arrived."""
        if header.flags & Flag.PAYLOAD:
            self._incoming.take(header, payload)
        else:
            self._unconfirmed -= 1
        return self._unconfirmed == 0 and self._incoming.complete

    def result(self) -> Combined:
        """The parts that were sent here, this rank's own among them."""
        rank = self.place.rank
        parts = self._incoming.with_own(rank, self.request.parts[rank])
        return Combined(parts=parts, traffic=self.traffic)

    def _slices(self, rank: int) -> Iterator[tuple[int, Header, Bytes | None]]:
        part, width = self.request.parts[rank], self.header.element_size
        memory = bytes_of(part)
        server = relay_of(rank, self.place.num_servers)
        for piece in place(self.request.key, part.numel(), width, 1, self.place.slice_bytes):
            header = replace(
                self.header,
                flags=Flag.PAYLOAD,
                root=rank,
                offset=piece.offset,
                num_elements=piece.num_elements,
                total_elements=part.numel(),
            )
            first = piece.offset * width
            yield server, header, memory[first : first + piece.num_elements * width]
