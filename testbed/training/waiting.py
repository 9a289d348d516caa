"""Waiting for messages: with patience, with a record of how long it took, and what it was for."""

from __future__ import annotations

import time
from collections.abc import Callable

from testbed.backends.protocol import Work
from testbed.base.errors import DeadlineExceeded
from testbed.base.types import Event, Result
from testbed.control.protocol import Control
from testbed.training.compressed.work import CompressedWork
from testbed.training.exchange.setup import AGREE_S


class Waiter:
    """Where one rank stands still.

    Args:
        control: told what this rank waits for; asked what the others do.
        patience_s: how long to wait for a message when all ranks have been fast so far.
        on_resume: called after every wait for a message that was not there yet.
    """

    def __init__(
        self, control: Control, patience_s: float, on_resume: Callable[[], None] | None = None
    ) -> None:
        self._on_resume = on_resume
        self.step = 0
        self.first = True
        self.staleness: int | None = None
        self._control = control
        self._patience_s = patience_s
        self._slowest_step_s = 0.0
        self._step_began_s = time.perf_counter()
        self._waited_s = 0.0
        self._step_waited_s = 0.0
        self._events: list[Event] = []

    def wait(self, work: Work, name: str) -> Result:
        """The result of an exchange.

        Raises:
            RankLost: a rank was lost.
            DeadlineExceeded: all ranks are alive, but somebody did not come; says what each does.
        """
        late = not work.done()
        if late:
            self._control.state = f"waiting for the exchange of {name!r} in step {self.step}"
        before_s = time.perf_counter()
        # A rank that computes for long is no rank that hangs: what was slow may be slow again.
        limit_s = max(self._patience_s, 2 * self._slowest_step_s)
        if self.first:
            limit_s = max(limit_s, AGREE_S)  # first steps compile, allocate and connect
        try:
            result = work.wait(limit_s)
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"{error}; {self._control.describe()}") from error
        waited_s = time.perf_counter() - before_s
        if late and self._on_resume is not None:
            self._on_resume()
        self._waited_s += waited_s
        self._step_waited_s += waited_s
        if result.staleness is not None:
            self.staleness = result.staleness
        if isinstance(work, CompressedWork):
            self._events += work.details
        self._events.append(work.event)
        return result

    def end_step(self) -> None:
        """A step is over: learn from it how long steps take here."""
        now_s = time.perf_counter()
        if not self.first:
            own_s = now_s - self._step_began_s - self._step_waited_s
            self._slowest_step_s = max(self._slowest_step_s, own_s)
        self._step_began_s, self._step_waited_s, self.first = now_s, 0.0, False
        self.step += 1
        self._control.state = f"computing step {self.step}"

    def take_waited_s(self) -> float:
        """Seconds waited since the last call."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def take_events(self) -> list[Event]:
        """Exchanges that were waited for since the last call."""
        events, self._events = self._events, []
        return events
