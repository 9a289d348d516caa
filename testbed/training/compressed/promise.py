"""An exchange that other threads end: the waiting half of `Work`, and a request passed on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError

from testbed.backends.protocol import Work
from testbed.errors import DeadlineExceeded
from testbed.nouns import Combined, Event, Request


class Promise:
    """See `Work`; ends once, by `succeed` or `fail`, whichever comes first.

    Attributes:
        stage: what is being done for it, in words.
    """

    def __init__(self, what: str) -> None:
        self.stage = "waiting for its turn"
        self._what = what
        self._result: Future[Combined] = Future()

    def succeed(self, result: Combined) -> None:
        """The result is in place."""
        with contextlib.suppress(InvalidStateError):  # it has failed meanwhile
            self._result.set_result(result)

    def fail(self, error: BaseException) -> None:
        """There will be no result."""
        with contextlib.suppress(InvalidStateError):  # it has ended meanwhile
            self._result.set_exception(error)

    def done(self) -> bool:
        """See `Work.done`."""
        return self._result.done()

    def wait(self, timeout_s: float | None = None) -> Combined:
        """See `Work.wait`."""
        try:
            return self._result.result(timeout_s)
        except TimeoutError:
            if self._result.done():  # it came in this very moment, or is a TimeoutError itself
                return self._result.result()
        raise DeadlineExceeded(
            f"{self._what} was not done within {timeout_s} s; it is {self.stage}; no rank is known "
            "to be lost; raise --deadline if the network is that slow"
        )

    def when_done(self, hear: Callable[[], None]) -> None:
        """See `Work.when_done`."""
        self._result.add_done_callback(lambda ended: hear())


class Relay(Promise):
    """A plain request that takes its turn among conversations.

    Args:
        request: what is to be submitted.
    """

    def __init__(self, request: Request) -> None:
        super().__init__(str(request))
        self._work: Work | None = None

    def take(self, work: Work) -> None:
        """The request has ended; so has this."""
        self._work = work
        try:
            result = work.wait(0.0)
        except Exception as error:  # raised again by whoever waits
            self.fail(error)
        else:
            self.succeed(result)

    @property
    def event(self) -> Event:
        """See `Work.event`."""
        assert self._work is not None
        return self._work.event
