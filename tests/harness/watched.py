"""A backend that lets a test look on: keeps every exchange, calls before each is submitted."""

from __future__ import annotations

import time
from collections.abc import Callable

from testbed.backends.protocol import Backend, Work
from testbed.base.types import Request, Traffic


class Watched:
    """See `Backend`.

    Args:
        inner: what carries the requests.
        before: called with each request, on the thread that submits it; may block.
    """

    def __init__(self, inner: Backend, before: Callable[[Request], None]) -> None:
        self.rank, self.size, self.capabilities = inner.rank, inner.size, inner.capabilities
        self.works: list[tuple[Request, Work]] = []
        self._inner = inner
        self._before = before

    def submit(self, request: Request) -> Work:
        self._before(request)
        work = self._inner.submit(request)
        self.works.append((request, work))
        return work

    def work_of(self, key: str, step: int) -> Work:
        """The exchange of this name; of two, the one submitted last."""
        return next(w for r, w in reversed(self.works) if (r.key, r.step) == (key, step))

    def await_start(self, key: str, step: int, within_s: float) -> None:
        """Until the backend has begun this exchange, which nobody else can tell."""
        work, end_s = self.work_of(key, step), time.monotonic() + within_s
        while work.event.started_s == work.event.submitted_s:
            assert time.monotonic() < end_s, f"{key!r} has not begun within {within_s:g} s"
            time.sleep(0.001)

    def traffic(self) -> Traffic:
        return self._inner.traffic()

    def close(self, timeout_s: float = 10.0) -> None:
        self._inner.close(timeout_s)
