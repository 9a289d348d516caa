"""Persistent MPI requests, made once for a place in memory and started each time it is used again.

Training sends the same buckets from the same memory in every step, so that posting a message costs
one `MPI_Start` instead of a new request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

from mpi4py import MPI


class Armed(Protocol):
    """Anything that holds persistent requests."""

    @property
    def requests(self) -> list[MPI.Prequest]:
        """All of them; none in flight when they are freed."""
        ...


A = TypeVar("A", bound=Armed)


class ArmedCache(Generic[A]):
    """The most recently used armed plans of one channel, bounded by their number of requests.

    The entries hold addresses, not tensors, so a tensor that is dropped is really freed; memory
    that comes back at the same address with the same size fits the old entry.
    """

    def __init__(self, max_requests: int = 1 << 15) -> None:
        self._max_requests = max_requests
        self._entries: OrderedDict[Hashable, A] = OrderedDict()
        self._num_requests = 0

    def get(self, key: Hashable, arm: Callable[[], A]) -> A:
        """The entry of this key, made if need be; the least recently used ones make room."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
            return entry
        entry = self._entries[key] = arm()
        self._num_requests += len(entry.requests)
        while self._num_requests > self._max_requests and len(self._entries) > 1:
            _, oldest = self._entries.popitem(last=False)
            self._num_requests -= len(oldest.requests)
            free_all(oldest.requests)
        return entry

    def clear(self) -> None:
        """Free all; nothing may be in flight."""
        for entry in self._entries.values():
            free_all(entry.requests)
        self._entries.clear()
        self._num_requests = 0

    def __len__(self) -> int:
        return len(self._entries)


def free_all(requests: list[MPI.Prequest]) -> None:
    """Give persistent requests back to MPI."""
    for request in requests:
        request.Free()
