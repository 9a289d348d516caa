"""Requests under way: which one a channel runs next, so that all ranks run the same one.

`fifo`: the order of submission. `priority`: rank 0 picks the most urgent request that it has,
announces it on the control plane, and every rank (rank 0 too) runs what was picked, in the order
of picking. Ranks become ready at different times, so a local pick would differ and deadlock.

Rank 0 picks on while the bytes that it picked and that have not ended are below the credit
(without one: while there are none), when a request comes and when one has ended or is about to (if
the backend says so), so that all ranks know the next ones before the channel is free. What
was picked is never taken back.

Requests of an older step go first, however urgent the younger ones are: a rank may have to see its
older ones end before it can submit the younger one that would be picked.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from testbed.backends.protocol import Group, PendingResult
from testbed.base.errors import RankLost, UsageError
from testbed.base.types import Event, Request, Result
from testbed.control.protocol import Loss


class PendingWork(PendingResult):
    """The `Work` of backends with a queue: a request on its way through a backend's thread.

    The submitting thread calls `done`, `wait` and `event`; the backend's thread calls `start` and
    then `finish` or `fail`.
    """

    def __init__(self, request: Request, deadline_s: float) -> None:
        super().__init__(request, deadline_s)
        self.request = request
        self._submitted_s = self._started_s = self._ended_s

    def start(self) -> None:
        """The backend begins to move bytes."""
        self._started_s = time.perf_counter()

    @property
    def event(self) -> Event:
        """When it was submitted, started and ended."""
        request = self.request
        return Event(
            request.op,
            request.key,
            request.step,
            request.channel,
            request.num_bytes,
            self._submitted_s,
            self._started_s,
            self._ended_s,
        )


# Op, key and step identify a request among those that wait on its channel.
_Identity = tuple[str, str, int]
# Channel and identity of a request that rank 0 picked.
_Choice = tuple[int, str, str, int]


class RequestQueue:
    """The waiting requests of all channels of one rank; thread-safe.

    Args:
        group: the job; its `order` and control plane are used, and its losses fail what waits.
        wake: called (from any thread) whenever `take` may have something new.
    """

    def __init__(self, group: Group, wake: Callable[[], None]) -> None:
        self._group = group
        self._wake = wake
        self._lock = threading.Lock()
        self._line: list[deque[PendingWork]] = [deque() for _ in range(group.num_channels)]  # fifo
        self._waiting = [_Named() for _ in range(group.num_channels)]  # priority
        self._announced: list[deque[_Identity]] = [deque() for _ in range(group.num_channels)]
        # Rank 0 alone: those not chosen yet, the most urgent first (step, priority, arrival).
        self._free: list[list[tuple[int, int, int, PendingWork]]] = [
            [] for _ in range(group.num_channels)
        ]
        self._num_submitted = 0
        # Rank 0 alone: requests that it chose and that have not ended, and their bytes.
        self._chosen: list[dict[PendingWork, int]] = [{} for _ in range(group.num_channels)]
        # Rank 0 alone: of those under way the ones that no longer count against the credit.
        self._gone: set[PendingWork] = set()
        self._announcing = False
        self._live: set[PendingWork] = set()
        self._failure: BaseException | None = None
        self._loss: Loss | None = None
        self._closed = False
        if group.order == "priority" and group.rank != 0:
            group.control.listen(f"{group.name}.order", self._on_choices)
        group.control.on_loss(self._on_loss)

    def submit(self, request: Request) -> PendingWork:
        """Queue a checked request on its channel.

        Raises:
            UsageError: the queue is closed.
        """
        work = PendingWork(request, self._group.deadline_s)
        with self._lock:
            if self._closed:
                raise UsageError("the backend is closed; submit before close()")
            failure = self._error_of(work)
            if failure is None:
                self._live.add(work)
                self._enter(work, request.channel)
        if failure is not None:
            work.fail(failure)
        else:
            self._announce_choices()
        self._wake()
        return work

    def _enter(self, work: PendingWork, channel: int) -> None:
        if self._group.order != "priority":
            self._line[channel].append(work)
            return
        self._waiting[channel].add(work)
        if self._chooses:
            request = work.request
            entry = (request.step, request.priority, self._num_submitted, work)
            heapq.heappush(self._free[channel], entry)
            self._num_submitted += 1

    def take(self, channel: int) -> PendingWork | None:
        """The next request of an idle channel, None while there is none to run."""
        if self._group.order == "priority":
            self._announce_choices()  # in one process its listeners have run when this returns
            with self._lock:
                return self._next_announced(channel)
        with self._lock:
            return self._line[channel].popleft() if self._line[channel] else None

    def _announce_choices(self) -> None:
        """Rank 0 chooses while there is credit and announces it; other ranks do nothing.

        One thread at a time, so that what was chosen first is announced first. Another one leaves
        its choices to that one, and so never waits here with a lock that a listener may need.
        """
        if not self._chooses:
            return
        while True:
            with self._lock:
                if self._announcing:
                    return
                chosen = [c for channel in range(len(self._waiting)) for c in self._choose(channel)]
                self._announcing = bool(chosen)
            if not chosen:
                return
            try:
                self._follow(chosen)  # its own choice need not come back to rank 0
                words = msgspec.msgpack.encode(chosen)
                topic = f"{self._group.name}.order"
                self._group.control.announce(
                    topic, words, members=self._group.size, others_alone=True
                )
            finally:
                with self._lock:
                    self._announcing = False

    def _next_announced(self, channel: int) -> PendingWork | None:
        """The request whose turn it is, if this rank has it already."""
        announced = self._announced[channel]
        work = self._waiting[channel].take(announced[0]) if announced else None
        if work is not None:
            announced.popleft()
        return work

    def _choose(self, channel: int) -> list[_Choice]:
        """Rank 0's next choices, most urgent first, while its credit lasts."""
        free, chosen = self._free[channel], self._chosen[channel]
        choices: list[_Choice] = []
        if not free:
            return choices
        under_way_bytes = sum(chosen.values())
        while free and not self._used_up(channel, under_way_bytes):
            urgent = heapq.heappop(free)[-1]
            chosen[urgent] = urgent.request.num_bytes
            choices.append((channel, *_identity(urgent)))
            under_way_bytes += urgent.request.num_bytes
        return choices

    def _used_up(self, channel: int, under_way_bytes: int) -> bool:
        credit = self._group.credit_bytes
        return bool(self._chosen[channel]) and (credit is None or under_way_bytes >= credit)

    def let_next(self, work: PendingWork) -> None:
        """A request that was taken is about to end: its bytes no longer count against the credit.

        Rank 0 then picks the next one a little early, so that all ranks know of it in time.
        """
        if self._chooses:
            with self._lock:
                self._let_go(work)
            self._announce_choices()

    def _let_go(self, work: PendingWork) -> None:
        if work in self._live and work not in self._gone:
            self._gone.add(work)
            self._chosen[work.request.channel].pop(work, None)

    def finish(self, work: PendingWork, result: Result | BaseException) -> None:
        """The request has ended, well or with an error; a later loss no longer fails it."""
        with self._lock:
            self._let_go(work)
            self._live.discard(work)
            self._gone.discard(work)
        if isinstance(result, Result):
            work.finish(result)
        else:
            work.fail(result)

    def fail_all(self, error: BaseException) -> None:
        """The backend's thread cannot go on: all that waits, now and later, gets the error."""
        with self._lock:
            self._failure = self._failure or error
            live, self._live = self._live, set()
        for work in live:
            work.fail(error)

    @property
    def _chooses(self) -> bool:
        return self._group.rank == 0 and self._group.order == "priority"

    @property
    def lost(self) -> bool:
        """Whether the group lost a member or the backend failed: nothing can finish any more."""
        return self._loss is not None or self._failure is not None

    @property
    def busy(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._live)

    def close(self) -> None:
        """Take no more requests; after a loss, also one that this rank reported, end all.

        A rank's own report calls the others' listeners, and not its own: without this a request
        that the others will never pick would keep the thread of the rank that failed.
        """
        with self._lock:
            self._closed = True
        if self._group.control.loss is not None:
            self._on_loss(self._group.control.loss)

    def _on_choices(self, announcement: bytes) -> None:
        self._follow(msgspec.msgpack.decode(announcement, type=list[_Choice]))

    def _follow(self, choices: list[_Choice]) -> None:
        with self._lock:
            for channel, op, key, step in choices:
                self._announced[channel].append((op, key, step))
        self._wake()

    def _on_loss(self, loss: Loss) -> None:
        with self._lock:
            self._loss = loss
            live, self._live = self._live, set()
        for work in live:
            work.fail(_loss_error(loss, work))
        self._wake()

    def _error_of(self, work: PendingWork) -> BaseException | None:
        if self._failure is not None:
            return self._failure
        return None if self._loss is None else _loss_error(self._loss, work)


class _Named:
    """Requests of one channel, found by name at once."""

    def __init__(self) -> None:
        self._works: dict[_Identity, deque[PendingWork]] = {}

    def add(self, work: PendingWork) -> None:
        """One more; several of one name go one after the other."""
        self._works.setdefault(_identity(work), deque()).append(work)

    def take(self, name: _Identity) -> PendingWork | None:
        """Take the first of a name, None if there is none."""
        works = self._works.get(name)
        if works is None:
            return None
        work = works.popleft()
        if not works:
            del self._works[name]
        return work


def _identity(work: PendingWork) -> tuple[str, str, int]:
    return (work.request.op.value, work.request.key, work.request.step)


def _loss_error(loss: Loss, work: PendingWork) -> RankLost:
    return RankLost(loss.who, loss.why, f"this rank was in {work.request}")
