"""Sums over all workers, added in rank order whatever the order of arrival."""

from __future__ import annotations

from typing import TYPE_CHECKING

from testbed.backends.zmq_ps.wire import (
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

    The first term's memory becomes the sum's: the caller must hand over tensors of its own.
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
        """The worker will never ask for the fold before this one: do not keep it for it."""
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
