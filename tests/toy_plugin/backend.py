"""A backend that passes notes over the control plane: slow, and short enough to read at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from testbed.backends.channels import ThreadedBackend
from testbed.backends.protocol import Group
from testbed.base.axes import BackendFacts
from testbed.base.parts import Part
from testbed.base.types import Capabilities, Op, Request, Result, Traffic

NOTE_BYTES = 16 << 20


@dataclass(frozen=True)
class NotesOptions:
    """Options of `toy-notes`.

    Attributes:
        patience_s: how long a note may take.
    """

    patience_s: float = 30.0


class NotesBackend(ThreadedBackend):
    """See `Backend`; every rank sends its whole tensor to all others and adds in rank order."""

    def __init__(self, group: Group, patience_s: float) -> None:
        self._patience_s = patience_s
        ops = frozenset({Op.ALL_REDUCE, Op.BROADCAST, Op.BARRIER})
        super().__init__(group, "toy-notes", Capabilities(ops, num_channels=1), self._pass_notes)

    def _pass_notes(self, request: Request) -> Result:
        tensor = request.tensor
        mine = b"" if tensor is None else bytes(tensor.detach().view(-1).view(torch.uint8).numpy())
        notes = [b"".join(pieces) for pieces in zip(*self._exchange(mine), strict=True)]
        if tensor is None or tensor.numel() == 0:
            return Result(tensor)
        given = [torch.frombuffer(bytearray(n), dtype=tensor.dtype) for n in notes]
        result = given[request.root] if request.op is Op.BROADCAST else sum(given[1:], given[0])
        tensor.detach().view(-1).copy_(result)
        moved = (self.size - 1) * len(mine)
        return Result(tensor, traffic=Traffic(moved, moved, num_messages=1))

    def _exchange(self, mine: bytes) -> Iterator[list[bytes]]:
        """All ranks' bytes, of equal length, in pieces that the control plane takes."""
        for start in range(0, max(1, len(mine)), NOTE_BYTES):
            note = mine[start : start + NOTE_BYTES]
            yield self._group.control.all_gather(
                f"{self._group.name}.notes", note, self._patience_s, members=self.size
            )


def open_notes(group: Group, options: object) -> NotesBackend:
    assert isinstance(options, NotesOptions)
    return NotesBackend(group, options.patience_s)


TOY_NOTES = Part(
    name="toy-notes",
    summary="whole tensors as notes over the control plane",
    build=open_notes,
    options=NotesOptions,
    facts=lambda options: BackendFacts(bus_factor=lambda n: float(n - 1)),
)
