"""One thread per channel, each running its requests one after another with blocking calls.

For backends whose library blocks without spinning (Gloo, NCCL, threads in one process). Backends
that must poll drive all channels from one thread instead.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from testbed.backends.checks import check_request
from testbed.backends.protocol import Group
from testbed.backends.queue import PendingWork, RequestQueue
from testbed.base.errors import RankLost, RunFailed, TestbedError
from testbed.base.types import Capabilities, Request, Result, Traffic
from testbed.control.protocol import Loss


class ThreadedBackend:
    """See `Backend`.

    Args:
        group: the job.
        name: the backend's name, for thread names and errors.
        capabilities: what `run` can.
        run: performs one checked request and returns its result; called on the channel's thread.
    """

    def __init__(
        self,
        group: Group,
        name: str,
        capabilities: Capabilities,
        run: Callable[[Request], Result],
    ) -> None:
        self.rank, self.size, self.capabilities = group.rank, group.size, capabilities
        self._group = group
        self._name = name
        self._run = run
        self._changed = threading.Condition()
        self._closing = False
        self._traffic = Traffic()
        self._lost = threading.Event()
        self._queue = RequestQueue(group, self._wake)
        group.control.on_loss(self._on_loss)
        self._threads = [
            threading.Thread(target=self._serve, args=(c,), name=f"{name}-{c}", daemon=True)
            for c in range(group.num_channels)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, request: Request) -> PendingWork:
        """See `Backend.submit`."""
        check_request(self._name, request, self.capabilities, self.size)
        return self._queue.submit(request)

    def traffic(self) -> Traffic:
        """See `Backend.traffic`."""
        with self._changed:
            return self._traffic

    def close(self, timeout_s: float = 10.0) -> None:
        """See `Backend.close`; after a loss a thread may stay inside a library call."""
        self._queue.close()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        end_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _on_loss(self, loss: Loss) -> None:
        self._lost.set()
        self._wake()

    def _serve(self, channel: int) -> None:
        while True:
            with self._changed:
                work = self._queue.take(channel)
                while work is None and not self._over():
                    self._changed.wait()
                    work = self._queue.take(channel)
            if work is None:
                return
            self._carry_out(work)

    def _over(self) -> bool:
        return self._queue.lost or (self._closing and not self._queue.busy)

    def _carry_out(self, work: PendingWork) -> None:
        work.start()
        try:
            result = self._run(work.request)
        except Exception as error:  # an error of the library: `wait` raises it
            self._fail(work, error)
            return
        with self._changed:
            self._traffic += result.traffic
        self._queue.finish(work, result)
        self._wake()

    def _fail(self, work: PendingWork, error: Exception) -> None:
        if isinstance(error, RankLost):  # known to this thread before it is to the queue
            self._queue.finish(work, error)
            self._wake()
            return
        # A broken connection is usually a lost rank: wait for the control plane, which names it.
        if not isinstance(error, TestbedError) and self._lost.wait(self._group.deadline_s / 2):
            return
        failure = RunFailed(f"{self._name} failed in {work.request}: {error}")
        failure.__cause__ = error
        self._queue.fail_all(failure)
        self._group.control.report_failure(str(failure))
        self._wake()
