"""How simultaneous messages slow each other: the model that planners and simulators share.

Each message has a start-up phase, which is neither slowed nor slows others, and then a transfer
phase at 1 / slowdown(k) of its speed alone, k = number of messages in their transfer phase at that
moment (measured for pairs by Shi, Chu and Li, 2021, INFOCOM: 1.5 for k = 2 on 10 Gbit/s; larger k
is an extrapolation). Two equal messages of M bytes thus both end at a + slowdown(2) b M.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclass
class _Transfer:
    startup_left_s: float
    transfer_left_s: float


class SharedLink(Generic[Key]):
    """The messages under way on one link, advanced from event to event.

    The caller starts messages at `now_s` and advances to `next_s()` or to an earlier moment;
    anything else is an error.

    Args:
        slowdown: factor on the transfer time of each of k = 1, 2, ... messages.

    Example:
        >>> link = SharedLink(lambda k: (k + 1) / 2)
        >>> link.start("x", 4.0, 10.0), link.start("y", 4.0, 10.0)
        (None, None)
        >>> link.advance(link.next_s()), link.advance(link.next_s()), link.now_s
        ([], ['x', 'y'], 19.0)
    """

    def __init__(self, slowdown: Callable[[int], float], now_s: float = 0.0) -> None:
        self.now_s = now_s
        self._slowdown = slowdown
        self._under_way: dict[Key, _Transfer] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def start(self, key: Key, startup_s: float, transfer_s: float) -> None:
        """Start a message at `now_s`; `key` identifies it until it has ended."""
        if key in self._under_way:
            raise ValueError(f"message {key!r} is under way already; expected a new key")
        self._under_way[key] = _Transfer(startup_s, transfer_s)

    def next_s(self) -> float:
        """The earliest end of a phase; infinity when nothing is under way."""
        factor = self._factor()
        return min((self._phase_end_s(t, factor) for t in self._under_way.values()), default=inf)

    def advance(self, to_s: float) -> list[Key]:
        """Advance the clock; returns the messages that have ended, in the order of their start.

        Raises:
            ValueError: the moment lies in the past or beyond the next event.
        """
        if not self.now_s <= to_s <= self.next_s():
            raise ValueError(
                f"cannot advance to {to_s}; expected between {self.now_s} and {self.next_s()}"
            )
        factor = self._factor()
        ended = [k for k, t in self._under_way.items() if self._pass(t, to_s, factor)]
        for key in ended:
            del self._under_way[key]
        self.now_s = to_s
        return ended

    def _factor(self) -> float:
        moving = sum(t.startup_left_s <= 0 for t in self._under_way.values())
        return self._slowdown(moving) if moving else 1.0

    def _phase_end_s(self, transfer: _Transfer, factor: float) -> float:
        if transfer.startup_left_s > 0:
            return self.now_s + transfer.startup_left_s
        return self.now_s + transfer.transfer_left_s * factor

    def _pass(self, transfer: _Transfer, to_s: float, factor: float) -> bool:
        over = self._phase_end_s(transfer, factor) <= to_s
        passed_s = to_s - self.now_s
        if transfer.startup_left_s > 0:
            transfer.startup_left_s = 0.0 if over else transfer.startup_left_s - passed_s
            return over and transfer.transfer_left_s <= 0
        transfer.transfer_left_s = 0.0 if over else transfer.transfer_left_s - passed_s / factor
        return over


@dataclass(frozen=True)
class Admitted:
    """When each message starts and ends, and on which channel it travels."""

    start_s: list[float]
    end_s: list[float]
    channel: list[int]


def first_in_first_out(
    ready_s: Sequence[float],
    phases_s: Sequence[tuple[float, float]],
    num_channels: int,
    slowdown: Callable[[int], float],
) -> Admitted:
    """Messages admitted in their order, each to the lowest free channel once it is ready.

    The fast form of driving a `SharedLink`: all transfers progress alike, so one virtual clock
    that runs at 1 / slowdown(k) tells every end, O(n log n).

    Args:
        ready_s: when each message is ready; one that is not holds up those behind it.
        phases_s: start-up and transfer time of each, alone on the link.
        num_channels: messages under way at once, at most.
        slowdown: as for `SharedLink`.

    Example:
        >>> first_in_first_out([0, 3], [(4, 10), (4, 4)], 2, lambda k: (k + 1) / 2).end_s
        [16.0, 13.0]
    """
    count = len(ready_s)
    result = Admitted([0.0] * count, [0.0] * count, [0] * count)
    factors = [1.0] + [slowdown(k) for k in range(1, num_channels + 1)]
    free = list(range(num_channels))
    starting: list[tuple[float, int]] = []
    moving: list[tuple[float, int]] = []
    now_s = virtual_s = 0.0
    head = 0
    while head < count or starting or moving:
        while head < count and free and ready_s[head] <= now_s:
            result.start_s[head], result.channel[head] = now_s, heappop(free)
            heappush(starting, (now_s + phases_s[head][0], head))
            head += 1
        factor = factors[len(moving)]
        move_s = now_s + max(0.0, moving[0][0] - virtual_s) * factor if moving else inf
        start_s = starting[0][0] if starting else inf
        event_s = min(move_s, start_s, ready_s[head] if head < count and free else inf)
        if event_s == move_s:
            virtual_s, done = heappop(moving)
            result.end_s[done] = event_s
            heappush(free, result.channel[done])
        else:
            virtual_s += (event_s - now_s) / factor
            if event_s == start_s:
                index = heappop(starting)[1]
                heappush(moving, (virtual_s + phases_s[index][1], index))
        now_s = event_s
    return result
