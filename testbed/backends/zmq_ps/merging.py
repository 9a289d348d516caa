"""A worker's half of MERGE: payloads go to the servers that merge them, as many come back."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator

import torch
from msgspec.structs import replace

from testbed.backends.zmq_ps.buffers import Bytes, bytes_of, tensor_of
from testbed.backends.zmq_ps.exchanges import AnswersOfAnySize, Place, Ticket
from testbed.backends.zmq_ps.placement import Slice, place
from testbed.backends.zmq_ps.wire import Flag, Header
from testbed.nouns import Combined, Request


class MergeExchange(AnswersOfAnySize):
    """All slices go to one server, which merges whole payloads.

    Args:
        request: with a payload and the merger's description.
        ticket: see `Exchange`.
        place_: see `Exchange`.
        owner: the server that merges this key.
    """

    def __init__(self, request: Request, ticket: Ticket, place_: Place, owner: int) -> None:
        super().__init__(request, ticket, place_)
        whole = place(request.key, self.header.total_elements, 1, 1, place_.slice_bytes)
        self.slices = tuple(Slice(owner, piece.offset, piece.num_elements) for piece in whole)
        self._merged = torch.empty(0, dtype=torch.uint8)
        self._lossless = True

    def take(self, header: Header, payload: memoryview) -> bool:
        """The merged payload, in one message: it is the answer to all slices."""
        self._merged = tensor_of(payload, header.dtype)
        self._lossless = not header.flags & Flag.REPACKED
        return True

    def result(self) -> Combined:
        """The merged payload; the request's own is left as it was."""
        return Combined(self._merged, traffic=self.traffic, lossless=self._lossless)

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
        place_: see `Exchange`.
    """

    def __init__(self, request: Request, ticket: Ticket, place_: Place) -> None:
        super().__init__(request, ticket, place_)
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

    def result(self) -> Combined:
        """The merged payloads, in the order of their ranges; the request's own are left."""
        parts = tuple(self._merged[number] for number in range(len(self.request.parts)))
        return Combined(parts=parts, traffic=self.traffic, lossless=self._lossless)

    def _slices(
        self, number: int, part: torch.Tensor, note: str
    ) -> Iterator[tuple[int, Header, Bytes | None]]:
        memory = bytes_of(part)
        server = (number + zlib.crc32(self.request.key.encode())) % len(self.request.parts)
        for piece in place(self.request.key, part.numel(), 1, 1, self.place.slice_bytes):
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
