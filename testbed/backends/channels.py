"""One thread per channel, each running its requests one after another with blocking calls.

For backends whose library blocks without spinning (Gloo, NCCL, threads in one process). Backends
that must poll drive all channels from one thread instead.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from testbed.backends.protocol import Group
from testbed.backends.queue import RequestQueue
from testbed.backends.work import PendingWork
from testbed.base.errors import RankLost, RunFailed, TestbedError
from testbed.base.types import Request, Result, Traffic
from testbed.control.protocol import Loss


class ChannelThreads:
    """Runs the requests of a group's channels.

    Args:
        group: the job.
        name: the backend's name, for thread names and errors.
        run: performs one request and returns its result; called on the channel's own thread.
    """

    def __init__(self, group: Group, name: str, run: Callable[[Request], Result]) -> None:
        self._group = group
        self._name = name
        self._run = run
        self._changed = threading.Condition()
        self._closing = False
        self._traffic = Traffic()
        self._mourning = threading.Event()
        self._queue = RequestQueue(group, self._wake)
        group.control.on_loss(self._mourn)
        self._threads = [
            threading.Thread(target=self._serve, args=(c,), name=f"{name}-{c}", daemon=True)
            for c in range(group.num_channels)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, request: Request) -> PendingWork:
        """Queue a checked request."""
        work = PendingWork(request, self._group.deadline_s)
        self._queue.submit(work)
        return work

    def traffic(self) -> Traffic:
        """What all finished requests moved."""
        with self._changed:
            return self._traffic

    def close(self, timeout_s: float) -> bool:
        """End the threads; False if one is still inside a library call (after a loss)."""
        self._queue.close()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        end_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _mourn(self, loss: Loss) -> None:
        self._mourning.set()
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
            self._perform(work)

    def _over(self) -> bool:
        return self._queue.lost or (self._closing and not self._queue.busy)

    def _perform(self, work: PendingWork) -> None:
        work.start()
        try:
            result = self._run(work.request)
        except Exception as error:  # a library's own: handed to whoever waits, never dropped
            self._fail(work, error)
            return
        with self._changed:
            self._traffic += result.traffic
        self._queue.retire(work)
        work.finish(result)
        self._wake()

    def _fail(self, work: PendingWork, error: Exception) -> None:
        if isinstance(error, RankLost):  # heard here before the queue heard of it
            self._queue.retire(work)
            work.fail(error)
            self._wake()
            return
        # A broken connection is usually a lost rank: wait for the control plane, which knows whom.
        if not isinstance(error, TestbedError) and self._mourning.wait(self._group.deadline_s / 2):
            return
        failure = RunFailed(f"{self._name} failed in {work.request}: {error}")
        failure.__cause__ = error
        self._queue.fail_all(failure)
        self._group.control.report_failure(str(failure))
        self._wake()
