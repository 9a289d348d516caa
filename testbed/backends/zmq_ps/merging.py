"""A worker's half of MERGE: its payload goes to the server of the key, one payload comes back."""

from __future__ import annotations

import torch
from msgspec.structs import replace

from testbed.backends.zmq_ps.buffers import tensor_of
from testbed.backends.zmq_ps.exchanges import AnswersOfAnySize, Place, Ticket
from testbed.backends.zmq_ps.placement import Slice, place
from testbed.backends.zmq_ps.wire import Flag, Header
from testbed.nouns import Combined, Request


class MergeExchange(AnswersOfAnySize):
    """All slices go to one server, because only whole payloads can be merged.

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
