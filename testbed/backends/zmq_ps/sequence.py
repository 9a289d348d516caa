"""Numbers for exchanges, the same on all ranks without talking.

Within a channel all ranks run the same requests in the same order, so counting suffices. A fold and
the spread that brings it back may be far apart, so folds are counted for each key when submitted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from testbed.backends.work import PendingWork
from testbed.backends.zmq_ps.worker_exchange import Ticket, fold_stream
from testbed.base.errors import UsageError
from testbed.base.types import Op


class Tickets:
    """Numbers the exchanges of one worker; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_folds: dict[str, int] = {}
        self._open: dict[str, tuple[int, int, int]] = {}  # key -> step, number, bytes of its fold
        self._given: dict[PendingWork, Ticket] = {}

    def submit(self, work: PendingWork, queue: Callable[[PendingWork], None]) -> None:
        """Number a fold or spread and queue it; others are numbered when they start.

        Raises:
            UsageError: a spread without its fold, or what the queue refuses.
        """
        op, key = work.request.op, work.request.key
        if op not in (Op.FOLD, Op.SPREAD):
            queue(work)
            return
        with self._lock:
            number = self._num_folds.get(key, 0)
            if op is Op.SPREAD:
                self._check_open(work)
                self._given[work] = Ticket(fold_stream(key), self._open[key][1])
            else:
                self._given[work] = Ticket(fold_stream(key), number, renewed=key in self._open)
            try:
                queue(work)
            except UsageError:
                del self._given[work]
                raise
            if op is Op.SPREAD:
                del self._open[key]
            else:
                self._num_folds[key] = number + 1
                self._open[key] = (work.request.step, number, work.request.num_bytes)

    def at_start(self, work: PendingWork, sequence: int) -> Ticket:
        """The number of a request whose channel has had `sequence` requests before."""
        given = self._given.pop(work, None)
        return Ticket(work.request.channel, sequence) if given is None else given

    def _check_open(self, work: PendingWork) -> None:
        request = work.request
        step, _, num_bytes = self._open.get(request.key, (-1, 0, 0))
        if (step, num_bytes) != (request.step, request.num_bytes):
            raise UsageError(
                f"{request} has no fold to bring back; fold {request.key!r} with the same step and "
                "size first, and spread it before it is folded again"
            )
