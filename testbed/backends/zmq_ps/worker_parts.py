"""A worker's half of ALL_TO_ALL: parts go out by way of servers, parts from all others come in.

A part for rank r goes through server r (modulo the number of servers): with a server beside every
worker it crosses the network once, on its way up, and never leaves the host on its way down.
"""

from __future__ import annotations

import itertools
import zlib
from collections import Counter
from collections.abc import Iterator

import torch
from msgspec.structs import replace

from testbed.backends.checks import NAMES
from testbed.backends.zmq_ps.frames import Bytes, bytes_of, tensor_of
from testbed.backends.zmq_ps.placement import Slice, place
from testbed.backends.zmq_ps.wire import Flag, Header
from testbed.backends.zmq_ps.worker_exchange import AnswersOfAnySize, IncomingParts, Layout, Ticket
from testbed.base.types import Request, Result


def relay_of(destination: int, num_servers: int) -> int:
    """The server through which a rank gets all its parts.

    Example:
        >>> [relay_of(rank, 2) for rank in range(4)]
        [0, 1, 0, 1]
    """
    return destination % num_servers


class AllToAllExchange(AnswersOfAnySize):
    """One message at least for each other rank, an empty one if need be, and one that asks.

    In headers `root` is the rank that a part goes to, on the way back the one that it comes from.
    """

    def __init__(self, request: Request, ticket: Ticket, layout: Layout) -> None:
        super().__init__(request, ticket, layout)
        dtype = NAMES[request.parts[layout.rank].dtype]
        self.header = replace(self.header, dtype=dtype, root=layout.rank)
        others = [rank for rank in range(layout.size) if rank != layout.rank]
        self._incoming = IncomingParts(others)
        # The question goes first: what is for this rank can come while its own parts leave.
        self._outgoing: list[tuple[int, Header, Bytes | None]] = [
            (relay_of(layout.rank, layout.num_servers), self.header, None)
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

    def result(self) -> Result:
        """The parts that were sent here, this rank's own among them."""
        rank = self.layout.rank
        parts = self._incoming.with_own(rank, self.request.parts[rank])
        return Result(parts=parts, traffic=self.traffic)

    def _slices(self, rank: int) -> Iterator[tuple[int, Header, Bytes | None]]:
        part, width = self.request.parts[rank], self.header.element_size
        memory = bytes_of(part)
        server = relay_of(rank, self.layout.num_servers)
        for piece in place(self.request.key, part.numel(), width, 1, self.layout.slice_bytes):
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


# A worker's half of MERGE: payloads go to the servers that merge them, as many come back.


class MergeExchange(AnswersOfAnySize):
    """All slices go to one server, which merges whole payloads.

    Args:
        request: with a payload and the merger's description.
        ticket: see `Exchange`.
        layout: see `Exchange`.
        owner: the server that merges this key.
    """

    def __init__(self, request: Request, ticket: Ticket, layout: Layout, owner: int) -> None:
        super().__init__(request, ticket, layout)
        whole = place(request.key, self.header.total_elements, 1, 1, layout.slice_bytes)
        self.slices = tuple(Slice(owner, piece.offset, piece.num_elements) for piece in whole)
        self._merged = torch.empty(0, dtype=torch.uint8)
        self._lossless = True

    def take(self, header: Header, payload: memoryview) -> bool:
        """The merged payload, in one message: it is the answer to all slices."""
        self._merged = tensor_of(payload, header.dtype)
        self._lossless = not header.flags & Flag.REPACKED
        return True

    def result(self) -> Result:
        """The merged payload; the request's own is left as it was."""
        return Result(self._merged, traffic=self.traffic, lossless=self._lossless)

    def _question(self, piece: Slice) -> Header:
        header = super()._question(piece)
        # Every worker describes the merger once, with its first slice.
        return header if piece.offset else replace(header, note=self.request.note.encode())


class CutMergeExchange(AnswersOfAnySize):
    """Each server merges one range of the message; its number stands in the headers' `root`.

    Which server has the first range depends on the key: selected elements may crowd in one range
    of every message, and workers begin at different servers.

    Args:
        request: with a payload for each server, and the merger's description in each line.
        ticket: see `Exchange`.
        layout: see `Exchange`.
    """

    def __init__(self, request: Request, ticket: Ticket, layout: Layout) -> None:
        super().__init__(request, ticket, layout)
        self._merged: dict[int, torch.Tensor] = {}
        self._lossless = True

    def messages(self) -> Iterator[tuple[int, Header, Bytes | None]]:
        """The slices of each part, the first of them with its merger; servers take turns."""
        notes = self.request.note.split("\n")
        slices = [
            self._slices(number, part, note)
            for number, (part, note) in enumerate(zip(self.request.parts, notes, strict=True))
        ]
        for turn in itertools.zip_longest(*slices):
            yield from filter(None, turn)

    def take(self, header: Header, payload: memoryview) -> bool:
        """What one server merged, in one message; servers differ in nothing but the range."""
        self._merged[header.root] = tensor_of(payload, header.dtype)
        self._lossless = self._lossless and not header.flags & Flag.REPACKED
        return len(self._merged) == len(self.request.parts)

    def result(self) -> Result:
        """The merged payloads, in the order of their ranges; the request's own are left."""
        parts = tuple(self._merged[number] for number in range(len(self.request.parts)))
        return Result(parts=parts, traffic=self.traffic, lossless=self._lossless)

    def _slices(
        self, number: int, part: torch.Tensor, note: str
    ) -> Iterator[tuple[int, Header, Bytes | None]]:
        memory = bytes_of(part)
        server = (number + zlib.crc32(self.request.key.encode())) % len(self.request.parts)
        for piece in place(self.request.key, part.numel(), 1, 1, self.layout.slice_bytes):
            header = replace(
                self.header,
                flags=self.header.flags | Flag.PAYLOAD,
                root=number,
                offset=piece.offset,
                num_elements=piece.num_elements,
                total_elements=part.numel(),
                note=b"" if piece.offset else note.encode(),
            )
            yield server, header, memory[piece.offset : piece.offset + piece.num_elements]
