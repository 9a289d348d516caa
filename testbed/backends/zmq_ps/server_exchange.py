"""What a server adds up, in rank order whatever the order of arrival, and what it passes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec.structs import replace

from testbed.backends.zmq_ps.wire import (
    ExchangeName,
    Flag,
    Header,
    Mismatch,
    Operation,
    Packet,
    answer,
    check_same,
)

if TYPE_CHECKING:
    import torch

SliceName = tuple[Operation, int, int, int]


class RankOrderSum:
    """A sum whose terms are added in rank order; later ranks' terms wait for their turn.

    The first term's memory becomes the sum's: the caller must not use it afterwards.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._turn = 0
        self._held: dict[int, torch.Tensor | None] = {}
        self.total: torch.Tensor | None = None

    def add(self, worker: int, term: torch.Tensor | None) -> bool:
        """Take a worker's term in; whether the sum is now complete.

        Raises:
            Mismatch: the worker gave a term before.
        """
        if worker in self._held or worker < self._turn:
            raise Mismatch(f"rank {worker} gave its term of one sum twice")
        self._held[worker] = term
        while self._turn in self._held:
            term = self._held.pop(self._turn)
            if self.total is None:
                self.total = term
            elif term is not None:
                self.total.add_(term)
            self._turn += 1
        return self._turn == self._num_workers


class _Entry:
    """One slice of a sum: pushed by all workers, for a fold also pulled by all."""

    def __init__(self, header: Header, num_workers: int) -> None:
        self.header = header
        self.sum = RankOrderSum(num_workers)
        self.complete = False
        self.pulls: list[Header] = []
        self.released: set[int] = set()


class Sums:
    """ALL_REDUCE, FOLD, SPREAD and BARRIER (a sum without elements) of one server."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._entries: dict[SliceName, _Entry] = {}

    @property
    def num_open(self) -> int:
        """Slices that wait for a worker."""
        return len(self._entries)

    def push(self, message: Packet) -> list[Packet]:
        """A worker's term of a slice; answered to all when the last one is in.

        Raises:
            Mismatch: the workers push different tensors.
        """
        header = message.header
        name = (*header.exchange, header.offset)
        replies = self._renew(header) if header.flags & Flag.RENEWED else []
        entry = self._entries.get(name)
        if entry is None:
            entry = self._entries[name] = _Entry(header, self._num_workers)
        check_same(entry.header, header)
        if not entry.sum.add(header.worker, message.payload):
            return replies
        entry.complete = True
        workers = range(self._num_workers)
        if header.operation is Operation.FOLD:
            replies += [answer(header, worker) for worker in workers]
            return replies + self._spread(name, entry)
        del self._entries[name]
        return replies + [answer(header, worker, entry.sum.total) for worker in workers]

    def pull(self, message: Packet) -> list[Packet]:
        """A worker asks for a folded slice.

        Raises:
            Mismatch: nothing of this name is being folded, or it was folded with other elements.
        """
        header = message.header
        name = (Operation.FOLD, header.stream, header.sequence, header.offset)
        entry = self._entries.get(name)
        if entry is None:
            raise Mismatch(f"spread of {header.key!r} in step {header.step}, which was not folded")
        check_same(entry.header, header)
        entry.pulls.append(header)
        return self._spread(name, entry) if entry.complete else []

    def _renew(self, header: Header) -> list[Packet]:
        """The worker will not spread the fold before this one: drop what is kept for it."""
        name = (Operation.FOLD, header.stream, header.sequence - 1, header.offset)
        entry = self._entries.get(name)
        if entry is None:
            return []
        entry.released.add(header.worker)
        return self._spread(name, entry) if entry.complete else []

    def _spread(self, name: SliceName, entry: _Entry) -> list[Packet]:
        replies = [answer(pull, pull.worker, entry.sum.total) for pull in entry.pulls]
        entry.released.update(pull.worker for pull in entry.pulls)
        entry.pulls.clear()
        if len(entry.released) == self._num_workers:
            del self._entries[name]
        return replies


# What a server passes on as it came: parts for one worker or for all, and broadcast tensors.


@dataclass
class _Gathering:
    """One all-gather on one server: all messages go to all workers that have begun it."""

    first: Header
    arrived: dict[int, int] = field(default_factory=dict)  # worker -> messages still to come
    messages: list[Packet] = field(default_factory=list)


@dataclass
class _Broadcasting:
    """One slice of a broadcast: held until every other worker has asked for it."""

    first: Header
    asked: list[Header] = field(default_factory=list)
    served: set[int] = field(default_factory=set)
    source: Packet | None = None


@dataclass
class _AllToAll:
    """One all-to-all on one server: what came, and what waits for its destination to ask."""

    first: Header
    left: dict[int, int] = field(default_factory=dict)  # worker -> messages still to come
    asked: set[int] = field(default_factory=set)
    held: dict[int, list[Packet]] = field(default_factory=dict)


class Relays:
    """ALL_GATHER, ALL_TO_ALL and BROADCAST of one server."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._all_to_alls: dict[ExchangeName, _AllToAll] = {}
        self._gatherings: dict[ExchangeName, _Gathering] = {}
        self._broadcasts: dict[tuple[ExchangeName, int], _Broadcasting] = {}

    @property
    def num_open(self) -> int:
        """Exchanges that wait for a worker."""
        return len(self._gatherings) + len(self._all_to_alls) + len(self._broadcasts)

    def all_gather(self, message: Packet) -> list[Packet]:
        """A slice of a worker's part, or the message that it has none here; sent to all that began.

        A worker is sent nothing before its own first message, so it never has to keep what
        belongs to an exchange that it has not begun.

        Raises:
            Mismatch: keys or dtypes differ, or a worker sends more than it announced.
        """
        header = message.header
        worker = header.worker
        entry = self._gatherings.setdefault(header.exchange, _Gathering(header))
        check_same(entry.first, header, ("key", "step", "dtype"))
        replies = [] if worker in entry.arrived else [passed_on(m, worker) for m in entry.messages]
        left = entry.arrived.get(worker, header.frame_count) - 1
        if left < 0:
            raise Mismatch(f"rank {worker} sent more of {header.key!r} than it announced")
        entry.arrived[worker] = left
        replies.append(answer(header, worker))
        if header.flags & Flag.PAYLOAD:
            replies += [passed_on(message, other) for other in entry.arrived if other != worker]
            entry.messages.append(message)
        if len(entry.arrived) == self._num_workers and not any(entry.arrived.values()):
            del self._gatherings[header.exchange]
        return replies

    def all_to_all(self, message: Packet) -> list[Packet]:
        """A slice of a part, or a worker's request for its parts.

        A worker is sent nothing before its request, so it never has to keep what belongs to an
        exchange that it has not begun. What carries nothing is not confirmed.

        Raises:
            Mismatch: keys, steps or dtypes differ, a worker sends more than it announced, or for a
                rank that does not exist.
        """
        header = message.header
        worker, destination = header.worker, header.root
        entry = self._all_to_alls.setdefault(header.exchange, _AllToAll(header))
        check_same(entry.first, header, ("key", "step", "dtype"))
        left = entry.left.get(worker, header.frame_count) - 1
        if left < 0 or destination >= self._num_workers:
            raise Mismatch(
                f"rank {worker} sent a part of {header.key!r} to rank {destination} that it had "
                f"not announced; there are {self._num_workers} ranks"
            )
        entry.left[worker] = left
        replies: list[Packet] = []
        if not header.flags & Flag.PAYLOAD:
            entry.asked.add(worker)
            held = entry.held.pop(worker, [])
            replies = [answer(header, worker), *(passed_on(part, worker) for part in held)]
        else:
            if header.num_elements:
                replies.append(answer(header, worker))
            if destination in entry.asked:
                replies.append(passed_on(message, destination))
            else:
                entry.held.setdefault(destination, []).append(message)
        if len(entry.left) == self._num_workers and not any(entry.left.values()):
            del self._all_to_alls[header.exchange]
        return replies

    def broadcast(self, message: Packet) -> list[Packet]:
        """The root's slice, or another worker's request for it.

        Raises:
            Mismatch: the workers disagree about the tensor or the root.
        """
        header = message.header
        name = (header.exchange, header.offset)
        entry = self._broadcasts.setdefault(name, _Broadcasting(header))
        check_same(entry.first, header)
        if header.worker == header.root:
            entry.source = message
            replies = [answer(header, header.worker)]
        else:
            entry.asked.append(header)
            replies = []
        if entry.source is not None:
            replies += [answer(ask, ask.worker, entry.source.payload) for ask in entry.asked]
            entry.served.update(ask.worker for ask in entry.asked)
            entry.asked.clear()
            if len(entry.served) == self._num_workers - 1:
                del self._broadcasts[name]
        return replies


def passed_on(message: Packet, worker: int) -> Packet:
    """A worker's slice as it goes to another worker; `root` names where it comes from."""
    header = message.header
    return Packet(
        replace(header, worker=worker, root=header.worker, flags=header.flags & Flag.PAYLOAD),
        message.payload,
    )
