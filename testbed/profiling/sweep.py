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


ROW_BYTES = 1 << 20
MAX_IN_ROW = 8


@dataclass(frozen=True)
class Exchange:
    """So many messages of one size at once, each on its own channel; or several in a row on one."""

    num_bytes: int
    num_messages: int = 1

    @property
    def num_in_row(self) -> int:
        """Messages that follow each other on the channel, as those of a training step do.

        What a message costs in a step is what it adds to those before it: while it is under way,
        the next one waits already, and no thread has to be woken for it.

        Example:
            >>> Exchange(4096).num_in_row, Exchange(1 << 22).num_in_row
            (8, 1)
        """
        if self.num_messages > 1:
            return 1
        return max(1, min(MAX_IN_ROW, ROW_BYTES // self.num_bytes))


def quick(max_bytes: int = 4 << 20, dilation: float = 1.0) -> LinkSweep:
    """For the warm-up of a run: 4 KiB to what the run sends, about a second on a local link.

    Args:
        max_bytes: the largest message that the run may send; at least 4 MiB are tried.
        dilation: how many times slower than usual the link is.
    """
    largest = max(max_bytes // 4 * 4, 4 << 20)
    sizes = [4096]
    while 2 * sizes[-1] < largest:
        sizes.append(2 * sizes[-1])
    return LinkSweep(
        sizes=(*sizes, largest),
        repeats=12,
        min_repeats=3,
        budget_s=max(0.6, dilation),
        # Large enough to load the link: small messages gain from company what large ones do not.
        concurrent_bytes=max(1 << 20, largest // 64 * 4),
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
