"""What one rank or server did, kept in memory until the run ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from testbed.base.plan import Plan
from testbed.base.types import DECODE, ENCODE, WHOLE, Event, Op

MAX_EVENTS: Final = 50_000
"""Events of a rank that are kept; 8 MB of its memory."""

Raw = tuple[str, str, int, float, float, int, int, int, str, int]
"""Kind, name, step, begin, end, channel, bytes, peer, half, message: see `TimelineEvent`."""

Asked = tuple[float, float, float]
"""A timed exchange with rank 0: asked, answered (on rank 0's clock), answer came; seconds."""


def fastest(burst: Sequence[Asked]) -> Asked:
    """The exchange of a burst that took the least time.

    Example:
        >>> fastest([(0.0, 5.0, 2.0), (3.0, 7.0, 4.0)])
        (3.0, 7.0, 4.0)
    """
    return min(burst, key=lambda asked: asked[2] - asked[0])


class Recorder:
    """Takes events from any thread; an event is one append to a list.

    All times are those of `time.perf_counter` in the process where they were read.

    Args:
        capacity: events that are kept.
        on: whether events are taken from the start; servers know of no warm-up.

    Attributes:
        on: whether events are taken.
        step: that is being computed.
        first_step: that is measured.
        is_last_part: the micro-batch that is computed is the step's last one.
        computing_since_s: when the layer whose gradient comes next began its backward pass.
        resumed_s: when a framework last went on because all its exchanges had ended.
        events: so far.
        bursts: the fastest of each burst of timed exchanges with rank 0.
        cores_used: step -> core seconds since the last reading, of the cores of this process: busy
            or stolen; busy with this run's processes; all, idle ones too. Read after some steps.
        awaited: step -> share of it in which the computing thread could run and had no core.
        beside: number of a server beside this rank -> what it did.
        plan: that was carried out; None: a framework's own.
        dropped: events that found no room.
        full_in: the first step in which one found none; None: there were none.

    Example:
        >>> recorder = Recorder(capacity=1, on=True)
        >>> recorder.add("ready", "fc.weight", 0.5, 0.5)
        >>> recorder.add("ready", "fc.bias", 0.6, 0.6)
        >>> len(recorder.events), recorder.dropped
        (1, 1)
    """

    def __init__(self, capacity: int = MAX_EVENTS, *, on: bool = False) -> None:
        self.on = on
        self.step = self.first_step = 0
        self.is_last_part = True
        self.computing_since_s = self.resumed_s = 0.0
        self.events: list[Raw] = []
        self.bursts: list[Asked] = []
        self.cores_used: dict[int, tuple[float, float, float]] = {}
        self.awaited: dict[int, float] = {}
        self.beside: dict[int, Recorder] = {}
        self.plan: Plan | None = None
        self.dropped = 0
        self.full_in: int | None = None
        self._capacity = capacity

    def add(
        self,
        kind: str,
        name: str,
        begin_s: float,
        end_s: float,
        step: int | None = None,
        channel: int = -1,
        num_bytes: int = 0,
        peer: int = -1,
        half: str = "",
        message: int = -1,
    ) -> None:
        """Note an event; its step is the one that is being computed unless another one is given."""
        if not self.on:
            return
        if step is None:
            step = self.step
        if len(self.events) >= self._capacity:
            self.dropped += 1
            if self.full_in is None or step < self.full_in:
                self.full_in = step
            return
        self.events.append(
            (kind, name, step, begin_s, end_s, channel, num_bytes, peer, half, message)
        )

    def add_exchange(self, event: Event) -> None:
        """Note a message's way through the backend, or what a compressor did to it."""
        of_it = (event.step, event.channel, event.num_bytes)
        if event.op in (ENCODE, DECODE):
            self.add(event.op, event.key, event.started_s, event.ended_s, *of_it)
        elif event.op != WHOLE:
            half = _HALVES.get(event.op, "")
            self.add("queued", event.key, event.submitted_s, event.submitted_s, *of_it, half=half)
            self.add("send", event.key, event.started_s, event.ended_s, *of_it, half=half)

    def add_received(self, event: Event, begin_s: float) -> None:
        """Note the part of a message's exchange in which its answer came."""
        of_it = (event.step, event.channel, event.num_bytes)
        half = _HALVES.get(event.op, "")
        self.add("receive", event.key, begin_s, event.ended_s, *of_it, half=half)

    def written(self) -> bytes:
        """What was recorded, for another process on this machine."""
        return msgspec.msgpack.encode((self.dropped, self.full_in, self.events))

    @classmethod
    def read(cls, words: bytes | memoryview) -> Recorder:
        """The inverse of `written`."""
        recorder, kind = cls(), tuple[int, int | None, list[Raw]]
        told = msgspec.msgpack.decode(words, type=kind)
        recorder.dropped, recorder.full_in, recorder.events = told
        return recorder


def event_cost_s(num_events: int = 2000, num_rounds: int = 5) -> float:
    """Seconds that noting one event takes here: two readings of the clock and one append."""
    costs = []
    for _ in range(num_rounds):
        recorder, clock = Recorder(on=True), time.perf_counter
        began_s = clock()
        for _ in range(num_events):
            recorder.add("compute", "layer", clock(), clock())
        costs.append((clock() - began_s) / num_events)
    return min(costs)


_HALVES: Final = {Op.FOLD.value: "fold", Op.SPREAD.value: "spread"}

Shown = Callable[[float], float]
"""What a rank's clock shows when `time.perf_counter` reads so many seconds."""


def as_read(reading_s: float) -> float:
    """The clock that is `time.perf_counter` itself."""
    return reading_s


def shown_events(events: Sequence[Raw], shown: Shown) -> list[Raw]:
    """The same events as a rank's clock shows them."""
    return [(*e[:3], shown(e[3]), shown(e[4]), *e[5:]) for e in events]
