"""One request of a worker as messages to servers, and the answers back into its tensor."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from msgspec.structs import replace

from testbed.backends.checks import NAMES
from testbed.backends.queue import PendingWork
from testbed.backends.zmq_ps.frames import Bytes, bytes_of, copy_in
from testbed.backends.zmq_ps.placement import Slice, place
from testbed.backends.zmq_ps.wire import Flag, Header, Operation
from testbed.base.errors import UsageError
from testbed.base.types import Op, Request, Result, Traffic

OPERATIONS = {op: Operation[op.name] for op in Op}


@dataclass(frozen=True, slots=True)
class Layout:
    """A worker's number among the others, and how all of them cut tensors."""

    rank: int
    size: int
    num_servers: int
    slice_bytes: int


@dataclass(frozen=True, slots=True)
class Ticket:
    """What numbers an exchange, the same on all ranks."""

    stream: int
    sequence: int
    renewed: bool = False


# Numbers for exchanges, the same on all ranks without talking. Within a channel all ranks run the
# same requests in the same order, so counting suffices. A fold and the spread that brings it back
# may be far apart, so folds are counted for each key when they are submitted.


class Tickets:
    """Numbers the exchanges of one worker; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_folds: dict[str, int] = {}
        self._open: dict[str, tuple[int, int, int]] = {}  # key -> step, number, bytes of its fold
        self._given: dict[PendingWork, Ticket] = {}

    def submit(self, request: Request, queue: Callable[[Request], PendingWork]) -> PendingWork:
        """Queue a request; folds and spreads are numbered now, others when they start.

        Raises:
            UsageError: a spread without its fold, or what the queue refuses.
        """
        if request.op not in (Op.FOLD, Op.SPREAD):
            return queue(request)
        key = request.key
        with self._lock:
            if request.op is Op.SPREAD:
                self._check_open(request)
                work = queue(request)
                self._given[work] = Ticket(fold_stream(key), self._open.pop(key)[1])
                return work
            number = self._num_folds.get(key, 0)
            work = queue(request)
            self._given[work] = Ticket(fold_stream(key), number, renewed=key in self._open)
            self._num_folds[key] = number + 1
            self._open[key] = (request.step, number, request.num_bytes)
            return work

    def at_start(self, work: PendingWork, sequence: int) -> Ticket:
        """The number of a request whose channel has had `sequence` requests before."""
        if work.request.op not in (Op.FOLD, Op.SPREAD):
            return Ticket(work.request.channel, sequence)
        with self._lock:
            return self._given.pop(work)

    def _check_open(self, request: Request) -> None:
        step, _, num_bytes = self._open.get(request.key, (-1, 0, 0))
        if (step, num_bytes) != (request.step, request.num_bytes):
            raise UsageError(
                f"{request} has no fold to bring back; fold {request.key!r} with the same step and "
                "size first, and spread it before it is folded again"
            )


def fold_stream(key: str) -> int:
    """The stream in which the folds of a key are numbered; apart from those of channels."""
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") | 1 << 63


class Exchange:
    """A request between its first message and its last answer."""

    def __init__(self, request: Request, ticket: Ticket, layout: Layout) -> None:
        self.request = request
        self.layout = layout
        tensor = torch.empty(0, dtype=torch.uint8) if request.tensor is None else request.tensor
        self._memory: Bytes = bytes_of(tensor)
        self.header = Header(
            operation=OPERATIONS[request.op],
            worker=layout.rank,
            root=request.root if request.op is Op.BROADCAST else 0,
            dtype=NAMES[tensor.dtype],
            stream=ticket.stream,
            sequence=ticket.sequence,
            flags=Flag.RENEWED if ticket.renewed else Flag.NONE,
            step=request.step,
            total_elements=tensor.numel(),
            learning_rate=request.learning_rate,
            key=request.key,
        )
        self.slices = place(
            request.key,
            tensor.numel(),
            self.header.element_size,
            layout.num_servers,
            layout.slice_bytes,
        )
        self.traffic = Traffic()
        self.version: int | None = None
        self.staleness: int | None = None
        self._waiting = {piece.offset for piece in self.slices}
        self._gives = self._gives_elements()

    def messages(self) -> Iterator[tuple[int, Header, Bytes | None]]:
        """Server, header and elements of each message that this worker has to send."""
        for piece in self.slices:
            yield piece.server, self._question(piece), self._elements(piece)

    def take(self, header: Header, payload: memoryview) -> bool:
        """An answer; whether it was the last one.

        Raises:
            KeyError: nothing was asked about this slice, or it was answered already.
        """
        self._waiting.remove(header.offset)
        if header.flags & Flag.PAYLOAD:
            copy_in(self._memory, header.offset * self.header.element_size, payload)
        if header.operation is Operation.APPLY:
            known = header.version if self.version is None else self.version
            self.version = min(known, header.version)
            self.staleness = max(self.staleness or 0, header.staleness)
        return not self._waiting

    @property
    def about_to_end(self) -> bool:
        """Whether few of many answers are missing: an eighth of them, or one of four and more."""
        return len(self.slices) >= 4 and len(self._waiting) <= max(1, len(self.slices) // 8)

    def result(self) -> Result:
        """What the request brought."""
        return Result(
            tensor=self.request.tensor,
            traffic=self.traffic,
            version=self.version,
            staleness=self.staleness,
        )

    def _gives_elements(self) -> bool:
        op, rank = self.request.op, self.layout.rank
        if op is Op.BROADCAST:
            return rank == self.request.root
        if op is Op.INSTALL:
            return rank == 0
        return op not in (Op.SPREAD, Op.BARRIER)

    def _question(self, piece: Slice) -> Header:
        note = b""
        if self.request.op is Op.INSTALL and self._gives:
            note = self.request.note.encode()
        flags = self.header.flags | (Flag.PAYLOAD if self._gives else Flag.NONE)
        return replace(
            self.header,
            flags=flags,
            offset=piece.offset,
            num_elements=piece.num_elements,
            note=note,
        )

    def _elements(self, piece: Slice) -> Bytes | None:
        if not self._gives:
            return None
        size = self.header.element_size
        return self._memory[piece.offset * size : (piece.offset + piece.num_elements) * size]
