"""What is sent to measure a link, and in which order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from testbed.backends.protocol import Backend
from testbed.base.errors import UsageError
from testbed.base.types import Op, Request
from testbed.control.protocol import Control, gather


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
        stream: bytes of messages that follow each other, as those of a step do; a size differs from
            the one before it there, which a row of one size does not show.
    """

    sizes: tuple[int, ...]
    repeats: int
    min_repeats: int
    budget_s: float
    max_concurrent: int = 4
    concurrent_bytes: int = 1 << 20
    seed: int = 1
    stream: tuple[int, ...] = ()

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


ROW_BYTES = 16 << 20
LONGEST_BUDGET_S = 10.0
MAX_IN_ROW = 9
# As much as any shaper lets pass at once after a pause (`cluster.topology.burst_bytes`: tbf's at
# 1 Gbit/s).
LEAD_BYTES = 192 << 10


@dataclass(frozen=True)
class Exchange:
    """Messages of one size at once, each on its own channel, and several in a row on each.

    `row` fixes how many in a row, so that one message and several at once are compared alike.
    """

    num_bytes: int
    num_messages: int = 1
    row: int | None = None

    @property
    def num_in_row(self) -> int:
        """Messages that follow each other on the channel, as those of a training step do.

        What a message costs in a step is what it adds to those before it: while it is under way,
        the next one waits already, no thread has to be woken for it, and the network has no unused
        capacity left over from a pause. So the time is counted from the end of the first one, but
        for rows that compare one message with several at once (see `time_of_one`).

        Example:
            >>> [Exchange(num_bytes).num_in_row for num_bytes in (4096, 1 << 22, 1 << 26)]
            [9, 4, 1]
        """
        if self.row is not None:
            return self.row
        return max(1, min(MAX_IN_ROW, ROW_BYTES // (self.num_bytes * self.num_messages)))

    @property
    def lead_bytes(self) -> int:
        """Bytes of the first message of the row, which does not count.

        What a shaper or a switch lets pass at once after a pause is used up by it (up to 1 Gbit/s
        in the kernel), so that short messages behind it move as fast as the line, as they do behind
        others in a step.

        Example:
            >>> [Exchange(num_bytes).lead_bytes >> 10 for num_bytes in (4096, 1 << 22)]
            [192, 4096]
        """
        if self.num_in_row == 1:
            return self.num_bytes
        return max(self.num_bytes, LEAD_BYTES)


def quick(
    max_bytes: int = 4 << 20,
    dilation: float = 1.0,
    stream: Sequence[int] = (),
    step_s: float = 0.0,
) -> LinkSweep:
    """For the warm-up of a run: 4 KiB to what the run sends, about a second on a local link.

    On a slow one it may take as long as a step of the run, up to ten seconds.

    Args:
        max_bytes: the largest message that the run may send; at least 4 MiB are tried.
        dilation: how many times slower than usual the link is.
        stream: bytes of the messages of a step, in their order.
        step_s: what a step will take, as far as is known.
    """
    largest = max(max_bytes // 4 * 4, 4 << 20)
    sizes = [4096]
    while (growth := 2 if sizes[-1] < 4 << 20 else 4) * sizes[-1] <= largest:
        sizes.append(growth * sizes[-1])
    return LinkSweep(
        sizes=tuple(sizes),
        repeats=12,
        min_repeats=3,
        budget_s=max(1.0, dilation, min(step_s, LONGEST_BUDGET_S)),
        # Large enough to load the link: small messages gain from company what large ones do not.
        concurrent_bytes=max(1 << 20, largest // 64 * 4),
        stream=tuple(stream),
    )


def thorough(max_bytes: int = 64 << 20) -> LinkSweep:
    """For `testbed profile`: sizes from 1 KiB to `max_bytes` in factors of 2."""
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
        >>> [(e.num_bytes, e.num_messages, e.num_in_row) for e in exchanges_of([4, 8], 2, 1 << 21)]
        [(4, 1, 9), (8, 1, 9), (2097152, 1, 4), (2097152, 2, 4)]
    """
    alone = [Exchange(size) for size in sizes]
    if max_concurrent < 2:
        return alone
    row = max(2, min(MAX_IN_ROW, ROW_BYTES // (num_bytes * max_concurrent)))
    return alone + [Exchange(num_bytes, k, row) for k in range(1, max_concurrent + 1)]


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


def time_of_one(exchange: Exchange, begin_s: float, ended_s: Sequence[float]) -> float:
    """Seconds of one message (or one on each channel) of an exchange on this rank.

        row of k > 1:       (E_k - E_1) / (k - 1),   E_i the end of the last channel's i-th message
        alone:              E_1 - begin
        a row of given k:   (E_k - begin) / k

    Where several channels are compared with one, all that was sent counts: when the last of the
    channels has ended its first message, others have moved parts of their second ones.

    Args:
        exchange: that was made.
        begin_s: when it began.
        ended_s: when each message ended, in the order in which they were submitted.

    Example:
        >>> time_of_one(Exchange(1 << 23), 0.0, [2.5, 4.5])
        2.0
        >>> time_of_one(Exchange(1 << 22, 2, row=2), 0.0, [1.0, 2.0, 3.0, 4.0])
        2.0
    """
    across = exchange.num_messages
    ends_s = [max(ended_s[i : i + across]) for i in range(0, len(ended_s), across)]
    if len(ends_s) == 1 or exchange.row is not None:
        return (ends_s[-1] - begin_s) / len(ends_s)
    return (ends_s[-1] - ends_s[0]) / (len(ends_s) - 1)


def of_job(exchange: Exchange, times_s: Sequence[float]) -> float:
    """The ranks' times of one exchange as one: of a row the mean, else the slowest rank's.

    A message alone has ended when all ranks have it, as has what is timed from its beginning.
    Through a row all go in step, and what one rank is late at the first end it is not slower
    afterwards.
    """
    if exchange.num_in_row > 1 and exchange.row is None:
        return sum(times_s) / len(times_s)
    return max(times_s)


def shares_of(streamed: Sequence[tuple[int, float]]) -> dict[float, float]:
    """The share of the time of a stream that each size in it takes.

    Example:
        >>> shares_of([(4, 1.0), (8, 6.0), (4, 1.0)])
        {4: 0.25, 8: 0.75}
    """
    whole_s = sum(time_s for _, time_s in streamed)
    spent: dict[float, float] = {}
    for num_bytes, time_s in streamed:
        spent[num_bytes] = spent.get(num_bytes, 0.0) + time_s / whole_s
    return spent


# A first estimate of a link: the time per byte of a large message, before anything is planned.

KEY = "first look"
FIRST_BYTES = 256 << 10  # connects, allocates, and uses up what a shaper lets pass after a pause
TIMED_BYTES = 1 << 20


def first_look(
    backend: Backend, control: Control, *, deadline_s: float, device: str = "cpu"
) -> float:
    """Seconds per byte of one message of 1 MiB right behind a smaller one; collective.

    Accurate to about 20 %, which is enough to choose how much the measurement itself may send. The
    mean over ranks, so that all choose alike.

    Args:
        backend: opened, with nothing under way; sums.
        control: the job's control plane.
        deadline_s: within which an exchange must be done.
        device: where the tensors are.

    Raises:
        RankLost, DeadlineExceeded: as `Work.wait` and `Control.all_gather`.
    """
    backend.submit(Request(Op.BARRIER, key=f"{KEY}/begin", step=0)).wait(deadline_s)
    first, timed = (
        backend.submit(
            Request(
                Op.ALL_REDUCE,
                torch.zeros(num_bytes // 4, device=device),
                key=f"{KEY}/{place}",
                step=0,
            )
        )
        for place, num_bytes in enumerate((FIRST_BYTES, TIMED_BYTES))
    )
    for work in (first, timed):
        work.wait(deadline_s)
    mine = (timed.event.ended_s - first.event.ended_s) / TIMED_BYTES
    return sum(gather(control, KEY, mine, float, deadline_s, backend.size)) / backend.size
