"""One request of a worker as messages to servers, and the answers back into its tensor."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from msgspec.structs import replace

from testbed.backends.checks import DTYPES, NAMES
from testbed.backends.queue import PendingWork
from testbed.backends.zmq_ps.frames import Bytes, bytes_of, copy_in, tensor_of
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


# Numbers for exchanges, the same on all ranks without messages. Within a channel all ranks run the
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
        self.first_answer_s = 0.0
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


# Requests of a worker whose answers are of any size: parts of other workers, merged payloads.

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
    """A request that knows only after its last answer that it was the last one."""

    @property
    def about_to_end(self) -> bool:
        """Always False: it is not known."""
        return False

    def _slices(self, part: torch.Tensor, server: int, first: Header) -> Iterator[Outgoing]:
        """The slices of a part, all to one server.

        Args:
            part: one-dimensional.
            server: that gets them.
            first: header of the first one; no other one has its note.
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
    """A request that brings a part from every other worker; servers confirm what they received."""

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
        """Its slices, and for each server without a slice a message that says so."""
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
    """One message at least for each other rank, which may be empty, and one request for parts.

    In headers `root` is the rank that a part goes to, on the way back the one that it comes from.
    """

    def __init__(self, request: Request, ticket: Ticket, layout: Layout) -> None:
        super().__init__(request, ticket, layout)
        rank, num_servers = layout.rank, layout.num_servers
        self.header = replace(self.header, dtype=NAMES[request.parts[rank].dtype], root=rank)
        # The request goes first: parts for this rank can arrive while its own parts leave.
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
        self._payloads = request.tensors
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
