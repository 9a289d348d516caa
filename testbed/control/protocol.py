"""Small messages between the members of a job (workers and dedicated servers).

Gradients never travel here. The control plane carries addresses, digests, the order of priority
messages and, above all, the report that a member raised, died or stopped answering.
"""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import msgspec

from testbed.base.errors import UsageError

T = TypeVar("T")

# Of a wait for members that work, however long: a lost one ends it.
UNTIL_LOST_S: Final = 7 * 24 * 3600.0
# Of ranks that open a backend: one may build its workload for longer than another.
OPEN_S: Final = 600.0
PIECE_BYTES: Final = 1 << 20  # of a long value: signs of life wait behind a frame


@dataclass(frozen=True)
class Loss:
    """Who was lost and why, as reported to every other member."""

    member: int
    who: str
    why: str


class Control(Protocol):
    """One member's end of the control plane.

    Attributes:
        rank: this member.
        size: how many members there are.
        state: what this member is doing now, in words that errors of other members quote; set by
            the code that does it.
    """

    rank: int
    size: int
    state: str

    def all_gather(
        self, name: str, value: bytes, timeout_s: float, members: int | None = None
    ) -> list[bytes]:
        """All members' values under this name, in rank order; the k-th calls of a name match.

        Args:
            name: what is exchanged, for errors and for matching.
            value: of this member.
            timeout_s: how long to wait for the others.
            members: only the first so many members take part; None = all.

        Raises:
            RankLost: a member was lost before it gave its value.
            DeadlineExceeded: a member did not call within `timeout_s`; the message names it.
        """
        ...

    def announce(
        self, topic: str, value: bytes, members: int | None = None, *, others_alone: bool = False
    ) -> None:
        """Send a value to all members; announcements arrive in the same order everywhere.

        Args:
            topic: what listeners name.
            value: what they receive.
            members: only the first so many receive it; None = all. What reaches a member that never
                listens is kept until the end.
            others_alone: it does not come back to this member.
        """
        ...

    def listen(self, topic: str, callback: Callable[[bytes], None]) -> None:
        """Call `callback` for each announcement of the topic, in order, on the control thread."""
        ...

    def time_exchange(self, timeout_s: float) -> tuple[float, float, float]:
        """Ask rank 0's process what its clock shows.

        Returns:
            Seconds of `time.perf_counter`: here when it was asked, there when it answered, here
            when the answer had come. One thread of a member asks at a time.

        Raises:
            RankLost: a member was lost.
            DeadlineExceeded: there was no answer within `timeout_s`.
        """
        ...

    def report_failure(self, why: str) -> None:
        """Report to all others that this member is about to end, and why."""
        ...

    def give_up(self, loss: Loss) -> None:
        """Take a member that lives for lost: every wait of this one ends with the reason."""
        ...

    def on_loss(self, callback: Callable[[Loss], None]) -> None:
        """Call `callback` once, on the control thread, when a member is lost (or already is)."""
        ...

    def describe(self) -> str:
        """The last known `state` of every member."""
        ...

    @property
    def loss(self) -> Loss | None:
        """The first loss that this member learned of."""
        ...

    def close(self) -> None:
        """Leave in good order; the others do not take it for a loss."""
        ...


def describe_self(role: str, rank: int) -> str:
    """This process in words, for error messages of other members."""
    return f"{role} {rank} (host {socket.gethostname()}, pid {os.getpid()})"


def gather(
    control: Control, name: str, mine: T, kind: type[T], timeout_s: float, members: int | None
) -> list[T]:
    """See `Control.all_gather`, for values that MessagePack can hold.

    Args:
        control: this member's end.
        name: see `Control.all_gather`, as are `timeout_s` and `members`.
        mine: this member's value.
        kind: its type, which those of the others are checked for.
        timeout_s: how long to wait for the others.
        members: only the first so many members take part; None = all.

    Example:
        >>> from testbed.control.inproc import InprocHub
        >>> gather(InprocHub(1).member(0), "sizes", (4, "a"), tuple[int, str], 1.0, None)
        [(4, 'a')]
    """
    told = control.all_gather(name, msgspec.msgpack.encode(mine), timeout_s, members)
    return [msgspec.msgpack.decode(each, type=kind) for each in told]


def decided_by_first(
    control: Control, name: str, decide: Callable[[], bytes], timeout_s: float, members: int
) -> bytes:
    """What member 0 decides, on each of the first members: they measure and read different things.

    Args:
        control: this member's end.
        name: see `Control.all_gather`.
        decide: called on member 0 alone.
        timeout_s: how long it may take.
        members: how many take part.

    Raises:
        UsageError: it raised one; on all of them.
        RankLost, DeadlineExceeded: see `Control.all_gather`.

    Example:
        >>> from testbed.control.inproc import InprocHub
        >>> decided_by_first(InprocHub(1).member(0), "batch", lambda: b"64", 1.0, 1)
        b'64'
    """
    mine = b""
    if control.rank == 0:
        try:
            mine = b"+" + decide()
        except UsageError as error:
            mine = b"-" + str(error).encode()
    told = control.all_gather(name, mine, timeout_s, members)[0]
    if told.startswith(b"-"):
        raise UsageError(told[1:].decode())
    return told[1:]


def hand_to_first(
    control: Control, topic: str, mine: bytes, timeout_s: float, members: int
) -> list[bytes]:
    """The first members' values, however long, on member 0; once in a job for each topic.

    Each travels in pieces, so that signs of life pass between them, and to member 0 alone.

    Args:
        control: this member's end, of one of the first members.
        topic: of the announcements.
        mine: this member's value.
        timeout_s: how long to wait for the others.
        members: how many take part.

    Returns:
        All of them in rank order on member 0, nothing elsewhere.

    Raises:
        RankLost, DeadlineExceeded: see `Control.all_gather`.

    Example:
        >>> from testbed.control.inproc import InprocHub
        >>> hand_to_first(InprocHub(1).member(0), "results", b"long", 1.0, 1)
        [b'long']
    """
    arrived: defaultdict[int, bytearray] = defaultdict(bytearray)

    def put(words: bytes) -> None:
        member, piece = msgspec.msgpack.decode(words, type=tuple[int, bytes])
        arrived[member] += piece

    if control.rank == 0:
        control.listen(topic, put)
    for first in range(0, len(mine), PIECE_BYTES):
        piece = (control.rank, mine[first : first + PIECE_BYTES])
        control.announce(topic, msgspec.msgpack.encode(piece), members=1)
    # What a member announces before it comes here has reached member 0 when all are here.
    control.all_gather(topic, b"", timeout_s, members)
    return [bytes(arrived[member]) for member in range(members)] if control.rank == 0 else []
