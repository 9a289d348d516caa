"""What is sent to get to know a link, and in which order: pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from testbed.errors import UsageError


@dataclass(frozen=True)
class LinkSweep:
    """How thoroughly a link is measured.

    Attributes:
        sizes: bytes of single messages, ascending, multiples of 4.
        repeats: rounds at most; a round is every size and every concurrency once.
        min_repeats: rounds at least: a median needs more than one.
        budget_s: measuring should end after about this time; large sizes are left out and rounds
            shortened to keep it.
        max_concurrent: messages at once at most; fewer where the backend has fewer channels.
        concurrent_bytes: size of each of them.
        seed: of the order within a round.
    """

    sizes: tuple[int, ...]
    repeats: int
    min_repeats: int
    budget_s: float
    max_concurrent: int = 4
    concurrent_bytes: int = 1 << 20
    seed: int = 1

    def __post_init__(self) -> None:
        wrong = [s for s in (*self.sizes, self.concurrent_bytes) if s < 4 or s % 4]
        if wrong or len(set(self.sizes)) < 2 or sorted(self.sizes) != list(self.sizes):
            raise UsageError(
                f"sizes are {list(self.sizes)} and {self.concurrent_bytes} bytes; expected two or "
                "more ascending sizes, multiples of the 4 bytes of a float32"
            )
        if not 1 <= self.min_repeats <= self.repeats:
            raise UsageError(
                f"repeats is {self.repeats} and min_repeats {self.min_repeats}; expected "
                "1 <= min_repeats <= repeats"
            )


@dataclass(frozen=True)
class Exchange:
    """So many messages of one size, all at once."""

    num_bytes: int
    num_messages: int = 1


def quick() -> LinkSweep:
    """For the warm-up of a run: 4 KiB to 4 MiB, about a second at most on a local link."""
    return LinkSweep(
        sizes=tuple(4096 << i for i in range(11)), repeats=12, min_repeats=3, budget_s=0.6
    )


def thorough(max_bytes: int = 64 << 20) -> LinkSweep:
    """For its own sake: 1 KiB up to `max_bytes`, twice as far with each size."""
    sizes = []
    size = 1024
    while size <= max_bytes:
        sizes.append(size)
        size *= 2
    return LinkSweep(
        sizes=tuple(sizes), repeats=40, min_repeats=5, budget_s=20.0, concurrent_bytes=4 << 20
    )


def exchanges_of(sizes: Sequence[int], max_concurrent: int, num_bytes: int) -> list[Exchange]:
    """One round: each size alone, then one size several times at once.

    Example:
        >>> exchanges_of([4, 8], 2, 8)
        [Exchange(num_bytes=4, num_messages=1), Exchange(num_bytes=8, num_messages=1), \
Exchange(num_bytes=8, num_messages=2)]
    """
    alone = [Exchange(size) for size in dict.fromkeys((*sizes, num_bytes))]
    if max_concurrent < 2:
        alone = [Exchange(size) for size in sizes]
    return alone + [Exchange(num_bytes, k) for k in range(2, max_concurrent + 1)]


def num_rounds(sweep: LinkSweep, round_s: float) -> int:
    """How often a round of this length fits into what the sweep may take.

    Example:
        >>> num_rounds(LinkSweep(sizes=(4, 8), repeats=9, min_repeats=2, budget_s=1.0), 0.3)
        3
    """
    fitting = int(sweep.budget_s / round_s) if round_s > 0 else sweep.repeats
    return max(sweep.min_repeats, min(sweep.repeats, fitting))


def shuffled(exchanges: Sequence[Exchange], seed: int, number: int) -> list[Exchange]:
    """The exchanges of one round in an order that all ranks find alike.

    A machine that grows busy so slows all sizes, and none always follows the same other.
    """
    order = list(exchanges)
    random.Random(f"{seed}/{number}").shuffle(order)
    return order
