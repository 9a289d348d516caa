"""What every member of a job (worker or dedicated server) can say to the others, in a few bytes.

Gradients never travel here. The control plane carries addresses, digests, the order of priority
messages and, above all, the news that a member raised, died or fell silent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Loss:
    """Who was lost and why, as told to every survivor."""

    member: int
    who: str
    why: str


class Control(Protocol):
    """One member's end of the control plane.

    Attributes:
        rank: this member.
        size: how many members there are.
        state: what this member is doing now, in words that others quote when they wait in vain;
            set by whoever does it.
    """

    rank: int
    size: int
    state: str

    def all_gather(
        self, name: str, value: bytes, timeout_s: float, members: int | None = None
    ) -> list[bytes]:
        """Everybody's value under this name, in rank order; the k-th call of a name meets the k-th.

        Args:
            name: what is exchanged, for errors and for matching.
            value: this member's contribution.
            timeout_s: how long to wait for the others.
            members: only the first so many members take part; None = all.

        Raises:
            RankLost: a member was lost before it gave its value.
            DeadlineExceeded: somebody did not come within `timeout_s`; the message names who.
        """
        ...

    def announce(
        self, topic: str, value: bytes, members: int | None = None, *, others_alone: bool = False
    ) -> None:
        """Tell all members; what is announced arrives everywhere in one order.

        Args:
            topic: what listeners name.
            value: what they receive.
            members: only the first so many receive it; None = all. What reaches a member that never
                listens is kept for good.
            others_alone: it does not come back to this member.
        """
        ...

    def listen(self, topic: str, callback: Callable[[bytes], None]) -> None:
        """Call `callback` for each announcement of the topic, in order, on the control thread."""
        ...

    def report_failure(self, why: str) -> None:
        """Tell all others that this member is about to end, and why."""
        ...

    def on_loss(self, callback: Callable[[Loss], None]) -> None:
        """Call `callback` once, on the control thread, when a member is lost (or already is)."""
        ...

    def describe(self) -> str:
        """What every member last said that it was doing."""
        ...

    @property
    def loss(self) -> Loss | None:
        """The first loss that this member learned of."""
        ...

    def close(self) -> None:
        """Leave in good order; the others do not take it for a loss."""
        ...
