"""Whose rounds a channel carries: one conversation's after another's, the same on every rank."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

Owner = TypeVar("Owner")
Item = TypeVar("Item")


class Turns(Generic[Owner, Item]):
    """One channel's rounds, in an order that depends on nothing but the order of conversations.

    A ring matches requests by position. When the answer to a round is decoded differs from rank to
    rank, so a conversation that goes on keeps the channel until it has said that a round is its
    last; whoever came meanwhile waits in line.

    Example:
        >>> turns = Turns[str, str]()
        >>> turns.ask("a", "a1", last=False), turns.ask("b", "b1", last=True)
        (['a1'], [])
        >>> turns.ask("a", "a2", last=True)
        ['a2', 'b1']
    """

    def __init__(self) -> None:
        self._holder: Owner | None = None
        self._line: deque[tuple[Owner, Item, bool]] = deque()

    def ask(self, owner: Owner, item: Item, last: bool) -> list[Item]:
        """A conversation wants to submit; returns what may be submitted now, in order.

        Args:
            owner: the conversation.
            item: its round.
            last: it has no other after this one.
        """
        if self._holder is owner:
            self._holder = None if last else owner
            return [item, *self._admitted()]
        self._line.append((owner, item, last))
        return self._admitted()

    def leave(self, owner: Owner) -> list[Item]:
        """A conversation has ended, whatever it said before; returns what may be submitted now.

        Example:
            >>> turns = Turns[str, str]()
            >>> turns.ask("a", "a1", last=False), turns.ask("b", "b1", last=True)
            (['a1'], [])
            >>> turns.leave("b"), turns.leave("a")
            ([], ['b1'])
        """
        if self._holder is owner:
            self._holder = None
        return self._admitted()

    def _admitted(self) -> list[Item]:
        admitted: list[Item] = []
        while self._line and self._holder is None:
            owner, item, last = self._line.popleft()
            self._holder = None if last else owner
            admitted.append(item)
        return admitted
