"""Requests of a worker whose answers are of any size: parts of other workers, merged payloads."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from msgspec.structs import replace

from testbed.backends.checks import DTYPES, NAMES
from testbed.backends.zmq_ps.frames import Bytes, bytes_of, copy_in, tensor_of
from testbed.backends.zmq_ps.placement import place
from testbed.backends.zmq_ps.wire import Flag, Header
from testbed.backends.zmq_ps.worker_exchange import Exchange, Layout, Ticket
from testbed.base.types import Request, Result

Outgoing = tuple[int, Header, Bytes | None]  # server, header, elements


class IncomingParts:
    """One part from each source; the first slice of a part tells its size.

    Args:
        sources: the workers from which a part is to come, if only an empty one.
    """

    def __init__(self, sources: Iterable[int]) -> None:
        self._parts: dict[int, torch.Tensor] = {}
        self._missing = dict.fromkeys(sources, 1)

    @property
    def complete(self) -> bool:
        """Whether all elements of all parts are here."""
        return not any(self._missing.values())

    def take(self, header: Header, payload: memoryview) -> None:
        """A slice of the part of worker `header.root`.

        Raises:
            KeyError: no part is expected from there.
        """
        source = header.root
        if source not in self._parts:
            dtype = DTYPES[header.dtype]
            self._parts[source] = torch.empty(header.total_elements, dtype=dtype)
            self._missing[source] = header.total_elements
        copy_in(bytes_of(self._parts[source]), header.offset * header.element_size, payload)
        self._missing[source] -= header.num_elements

    def with_own(self, rank: int, own: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """All parts in rank order, this rank's own among them."""
        parts = {**self._parts, rank: own}
        return tuple(parts[r] for r in sorted(parts))


class AnswersOfAnySize(Exchange):
    """A request whose answers tell only at the end that they were the last ones."""

    @property
    def about_to_end(self) -> bool:
        """Nobody knows."""
        return False

    def _slices(self, part: torch.Tensor, server: int, first: Header) -> Iterator[Outgoing]:
        """The slices of a part, all to one server.

        Args:
            part: one-dimensional.
            server: that gets them.
            first: header of the first one; its note goes with no other.
        """
        memory, width = bytes_of(part), first.element_size
        for piece in place(first.key, part.numel(), width, 1, self.layout.slice_bytes):
            header = replace(
                first,
                flags=first.flags | Flag.PAYLOAD,
                offset=piece.offset,
                num_elements=piece.num_elements,
                total_elements=part.numel(),
                note=b"" if piece.offset else first.note,
            )
            begin = piece.offset * width
            yield server, header, memory[begin : begin + piece.num_elements * width]


class PartsExchange(AnswersOfAnySize):
    """A request that brings a part from every other worker; servers confirm what they got."""

    def __init__(self, request: Request, ticket: Ticket, layout: Layout) -> None:
        super().__init__(request, ticket, layout)
        self._incoming = IncomingParts(r for r in range(layout.size) if r != layout.rank)
        self._unconfirmed = 0

    def take(self, header: Header, payload: memoryview) -> bool:
        """A slice of another worker's part, or the confirmation of a message of ours."""
        if header.flags & Flag.PAYLOAD:
            self._incoming.take(header, payload)
        else:
            self._unconfirmed -= 1
        return self._unconfirmed == 0 and self._incoming.complete

    def result(self) -> Result:
        """The parts for this rank, its own among them."""
        rank, request = self.layout.rank, self.request
        own = request.parts[rank] if request.tensor is None else request.tensor
        parts = self._incoming.with_own(rank, own)
        return Result(request.tensor, parts, self.traffic)


class AllGatherExchange(PartsExchange):
    """An all-gather: this worker's part goes out, parts of sizes not known before come in."""

    def __init__(self, request: Request, ticket: Ticket, layout: Layout) -> None:
        super().__init__(request, ticket, layout)
        self._counts = [
            max(1, sum(piece.server == server for piece in self.slices))
            for server in range(layout.num_servers)
        ]
        self._unconfirmed = sum(self._counts)

    def messages(self) -> Iterator[Outgoing]:
        """Its slices, and for each server without a slice the word that there is none."""
        for piece in self.slices:
            header = replace(self._question(piece), frame_count=self._counts[piece.server])
            yield piece.server, header, self._elements(piece)
        for server in set(range(self.layout.num_servers)) - {p.server for p in self.slices}:
            yield server, replace(self.header, frame_count=1), None


def relay_of(destination: int, num_servers: int) -> int:
    """The server through which a rank gets all parts of an all-to-all.

    With a server beside every worker a part crosses the network once, on its way up, and never
    leaves the host on its way down.

    Example:
        >>> [relay_of(rank, 2) for rank in range(4)]
        [0, 1, 0, 1]
    """
    return destination % num_servers


class AllToAllExchange(PartsExchange):
    """One message at least for each other rank, an empty one if need be, and one that asks.

    In headers `root` is the rank that a part goes to, on the way back the one that it comes from.
    """

    def __init__(self, request: Request, ticket: Ticket, layout: Layout) -> None:
        super().__init__(request, ticket, layout)
        rank, num_servers = layout.rank, layout.num_servers
        self.header = replace(self.header, dtype=NAMES[request.parts[rank].dtype], root=rank)
        # The question goes first: what is for this rank can come while its own parts leave.
        self._outgoing: list[Outgoing] = [(relay_of(rank, num_servers), self.header, None)]
        for other, part in enumerate(request.parts):
            if other != rank:
                header = replace(self.header, root=other)
                self._outgoing += self._slices(part, relay_of(other, num_servers), header)
        self._unconfirmed = sum(
            elements is None or elements.size > 0 for _, _, elements in self._outgoing
        )

    def messages(self) -> Iterator[Outgoing]:
        """See `Exchange.messages`; each says how many there are for its server."""
        counts = Counter(server for server, _, _ in self._outgoing)
        for server, header, elements in self._outgoing:
            yield server, replace(header, frame_count=counts[server]), elements


class MergeExchange(AnswersOfAnySize):
    """A merge: payloads go to the servers that merge them, as many come back.

    A whole payload goes to one server. Of a message that was cut each server merges one range,
    whose number stands in the headers' `root`.

    Args:
        request: a payload, or one for each server; the merger's description in each line.
        ticket: see `Exchange`.
        layout: see `Exchange`.
        first: the server of the whole payload, or of the first range.
    """

    def __init__(self, request: Request, ticket: Ticket, layout: Layout, first: int) -> None:
        super().__init__(request, ticket, layout)
        self._payloads = request.parts if request.tensor is None else (request.tensor,)
        self._first = first
        self._merged: dict[int, torch.Tensor] = {}
        self._lossless = True

    def messages(self) -> Iterator[Outgoing]:
        """The slices of each payload, the first of them with its merger; servers take turns."""
        notes = self.request.note.split("\n")
        slices = [
            self._slices(
                payload,
                (self._first + number) % self.layout.num_servers,
                replace(self.header, root=number, note=note.encode()),
            )
            for number, (payload, note) in enumerate(zip(self._payloads, notes, strict=True))
        ]
        for turn in itertools.zip_longest(*slices):
            yield from filter(None, turn)

    def take(self, header: Header, payload: memoryview) -> bool:
        """What one server merged, in one message: it is the answer to all slices."""
        self._merged[header.root] = tensor_of(payload, header.dtype)
        self._lossless = self._lossless and not header.flags & Flag.REPACKED
        return len(self._merged) == len(self._payloads)

    def result(self) -> Result:
        """The merged payloads, in the order of their ranges; the request's own are left."""
        parts = tuple(self._merged[number] for number in range(len(self._payloads)))
        whole = None if self.request.parts else parts[0]
        return Result(whole, self.request.parts and parts, self.traffic, lossless=self._lossless)
