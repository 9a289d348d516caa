"""The control plane of members that are threads of one process; the reference for tests."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from testbed.base.errors import DeadlineExceeded, RankLost
from testbed.control.protocol import Loss


class InprocHub:
    """What the members of one process share. Make one, then one `member(rank)` per thread."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._changed = threading.Condition(threading.RLock())
        self._values: dict[tuple[str, int], dict[int, bytes]] = defaultdict(dict)
        self._listeners: dict[str, list[tuple[int, Callable[[bytes], None]]]] = defaultdict(list)
        # By topic: announcements, each with those who receive it.
        self._history: dict[str, list[tuple[frozenset[int], bytes]]] = defaultdict(list)
        self._loss_callbacks: list[tuple[int, Callable[[Loss], None]]] = []
        self._loss: Loss | None = None
        self.members: dict[int, InprocControl] = {}
        self._shared: dict[str, Any] = {}

    def member(self, rank: int) -> InprocControl:
        """The end of the control plane that one thread holds."""
        member = self.members[rank] = InprocControl(self, rank)
        return member

    def meet(
        self, rank: int, name: str, turn: int, value: bytes, members: int, limit_s: float
    ) -> list[bytes]:
        """Give a value and wait for those of the others."""
        end_s = time.monotonic() + limit_s
        with self._changed:
            values = self._values[(name, turn)]
            values[rank] = value
            self._changed.notify_all()
            while len(values) < members:
                if self._loss is not None:
                    raise RankLost(self._loss.who, self._loss.why, f"this rank was in {name!r}")
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    absent = ", ".join(str(r) for r in range(members) if r not in values)
                    raise DeadlineExceeded(f"{name!r}: no word from rank {absent} in {limit_s:g} s")
                self._changed.wait(left_s)
            return [values[r] for r in range(members)]

    def share(self, name: str, make: Callable[[], Any]) -> Any:
        """One object for all members, made by the first call."""
        with self._changed:
            if name not in self._shared:
                self._shared[name] = make()
            return self._shared[name]

    def announce(self, topic: str, value: bytes, receivers: frozenset[int]) -> None:
        """Call the listeners that are to receive it, one announcement after the other."""
        with self._changed:
            self._history[topic].append((receivers, value))
            for rank, callback in self._listeners[topic]:
                if rank in receivers:
                    callback(value)

    def add_listener(self, rank: int, topic: str, callback: Callable[[bytes], None]) -> None:
        """Call it with what was announced so far, then with what comes."""
        with self._changed:
            for receivers, value in self._history[topic]:
                if rank in receivers:
                    callback(value)
            self._listeners[topic].append((rank, callback))

    def lose(self, loss: Loss) -> None:
        """Report the loss to all other members."""
        with self._changed:
            if self._loss is not None:
                return
            self._loss = loss
            callbacks = [callback for rank, callback in self._loss_callbacks if rank != loss.member]
            self._changed.notify_all()
        for callback in callbacks:
            callback(loss)

    def add_loss_callback(self, rank: int, callback: Callable[[Loss], None]) -> None:
        """Call it with the first loss."""
        with self._changed:
            self._loss_callbacks.append((rank, callback))
            loss = self._loss
        if loss is not None:
            callback(loss)

    @property
    def loss(self) -> Loss | None:
        """The first loss."""
        return self._loss


class InprocControl:
    """One thread's end; see `Control` for what each call means."""

    def __init__(self, hub: InprocHub, rank: int) -> None:
        self.rank = rank
        self.size = hub.size
        self.state = "starting"
        self._hub = hub
        self._turns: dict[str, int] = defaultdict(int)

    def all_gather(
        self, name: str, value: bytes, timeout_s: float, members: int | None = None
    ) -> list[bytes]:
        """See `Control.all_gather`."""
        turn = self._turns[name]
        self._turns[name] += 1
        return self._hub.meet(self.rank, name, turn, value, members or self.size, timeout_s)

    def share(self, name: str, make: Callable[[], Any]) -> Any:
        """One object for all members: threads of a process need not send what they share."""
        return self._hub.share(name, make)

    def announce(
        self, topic: str, value: bytes, members: int | None = None, *, others_alone: bool = False
    ) -> None:
        """See `Control.announce`."""
        receivers = set(range(members or self.size)) - ({self.rank} if others_alone else set())
        self._hub.announce(topic, value, frozenset(receivers))

    def listen(self, topic: str, callback: Callable[[bytes], None]) -> None:
        """See `Control.listen`."""
        self._hub.add_listener(self.rank, topic, callback)

    def time_exchange(self, timeout_s: float) -> tuple[float, float, float]:
        """See `Control.time_exchange`; rank 0 is a thread of this process."""
        return time.perf_counter(), time.perf_counter(), time.perf_counter()

    def report_failure(self, why: str) -> None:
        """See `Control.report_failure`."""
        self._hub.lose(Loss(self.rank, f"rank {self.rank}", why))

    def give_up(self, loss: Loss) -> None:
        """See `Control.give_up`; the waits of all other threads end, too."""
        self._hub.lose(loss)

    def on_loss(self, callback: Callable[[Loss], None]) -> None:
        """See `Control.on_loss`."""
        self._hub.add_loss_callback(self.rank, callback)

    def describe(self) -> str:
        """See `Control.describe`."""
        return "; ".join(f"rank {r}: {m.state}" for r, m in sorted(self._hub.members.items()))

    @property
    def loss(self) -> Loss | None:
        """See `Control.loss`."""
        return self._hub.loss

    def close(self) -> None:
        """See `Control.close`; a thread that leaves in order leaves nothing behind."""
