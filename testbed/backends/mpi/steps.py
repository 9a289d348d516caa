"""What a collective is to the loop: a generator that yields an MPI request wherever it waits."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Protocol, TypeVar

from mpi4py import MPI

from testbed.backends.mpi.patience import Patience
from testbed.nouns import Combined, Request

T = TypeVar("T")
Steps = Generator[MPI.Request, None, T]


class Collectives(Protocol):
    """A family of collectives on the communicators of all channels."""

    def steps(self, request: Request, nearly: Callable[[], None]) -> Steps[Combined]:
        """The request as a generator; nothing is posted before its first `next`.

        Args:
            request: to carry out.
            nearly: may be called when it is about to end.
        """
        ...

    def free(self) -> None:
        """Give back what MPI holds for it; nothing may be in flight."""
        ...


def complete(steps: Steps[T], patience: Patience) -> T:
    """Run one generator to its end on the calling thread."""
    while True:
        try:
            waited = next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        while not waited.Test():
            patience.pause()
        patience.reset()
