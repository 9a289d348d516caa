"""The one implementation of `Work`: a request, its three time stamps and its result."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from testbed.base.errors import DeadlineExceeded
from testbed.base.types import Event, Request, Result


class PendingWork:
    """A request on its way through a backend's thread.

    The submitting thread calls `done`, `wait` and `event`; the backend's thread calls `start` and
    then `finish` or `fail`, once. A second `finish` or `fail` is ignored, so that a failure that
    reaches all pending work cannot overtake a result.
    """

    def __init__(self, request: Request, deadline_s: float) -> None:
        self.request = request
        self._deadline_s = deadline_s
        self._done = threading.Event()
        self._settle = threading.Lock()
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._submitted_s = time.perf_counter()
        self._listeners: list[Callable[[], None]] = []
        self._started_s = self._submitted_s
        self._ended_s = self._submitted_s

    def start(self) -> None:
        """The backend begins to move bytes."""
        self._started_s = time.perf_counter()

    def finish(self, result: Result) -> None:
        """The result is in place."""
        self._close(result, None)

    def fail(self, error: BaseException) -> None:
        """There will be no result."""
        self._close(None, error)

    def _close(self, result: Result | None, error: BaseException | None) -> None:
        with self._settle:
            if self._done.is_set():
                return
            self._result, self._error = result, error
            self._ended_s = time.perf_counter()
            self._done.set()
            listeners, self._listeners = self._listeners, []
        for hear in listeners:
            hear()

    def when_done(self, hear: Callable[[], None]) -> None:
        """See `Work.when_done`."""
        with self._settle:
            if not self._done.is_set():
                self._listeners.append(hear)
                return
        hear()

    def done(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> Result:
        """The result; see `Work.wait`."""
        limit_s = self._deadline_s if timeout_s is None else timeout_s
        if not self._done.wait(limit_s):
            raise DeadlineExceeded(
                f"{self.request} was not done within {limit_s:g} s; no rank is known to be lost; "
                "raise --deadline if the network is that slow"
            )
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

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
