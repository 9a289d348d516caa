"""One thread per rank that runs the collectives of all channels and alone calls MPI."""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import torch
from mpi4py import MPI

from testbed.backends.mpi.backoff import Backoff, sleep_exactly
from testbed.backends.queue import PendingWork, RequestQueue
from testbed.base.errors import DeadlineExceeded, Disagreement, RunFailed, TestbedError, tell
from testbed.base.types import Request, Result, Traffic

# A collective is a generator that yields an MPI request wherever it waits.

T = TypeVar("T")
Steps = Generator[MPI.Request, None, T]


class Collectives(Protocol):
    """A family of collectives on the communicators of all channels."""

    def steps(self, request: Request, about_to_end: Callable[[], None]) -> Steps[Result]:
        """The request as a generator; nothing is posted before its first `next`.

        Args:
            request: to carry out.
            about_to_end: may be called when it is.
        """
        ...

    def free(self) -> None:
        """Give back what MPI holds for it; nothing may be in flight."""
        ...


def memory(tensor: torch.Tensor) -> MPI.buffer:
    """The bytes of a contiguous CPU tensor; holds no reference, so the caller keeps it alive."""
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def complete(steps: Steps[T], backoff: Backoff) -> T:
    """Run one generator to its end on the calling thread."""
    while True:
        try:
            waited = next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        while not waited.Test():
            backoff.pause()
        backoff.reset()


def _named(error: BaseException, request: Request) -> BaseException:
    """The error with the request that it came from."""
    named: TestbedError
    if isinstance(error, Disagreement):
        named = Disagreement(f"{error}; in {request}")
    elif isinstance(error, TestbedError) or not isinstance(error, Exception):
        return error
    else:
        named = RunFailed(f"{type(error).__name__}: {error}; in {request}")
    named.__cause__ = error
    return named


JOIN_AFTER_LOSS_S = 1.0


class Wakeup:
    """Wakes the thread that waits for it; no notification is lost, however early it comes."""

    def __init__(self) -> None:
        self._pending: queue.SimpleQueue[None] = queue.SimpleQueue()

    def notify(self) -> None:
        """Wake the waiting thread; from any thread."""
        self._pending.put(None)

    def notified(self) -> bool:
        """Whether `notify` was called since the last time."""
        if self._pending.empty():
            return False
        self.wait()
        return True

    def wait(self) -> None:
        """Block until `notify` is called, without using the core; takes all notifications."""
        self._pending.get()
        while not self._pending.empty():
            self._pending.get()


@dataclass(slots=True, eq=False)
class Task:
    """A channel's request in flight: its generator and the MPI request that it waits for."""

    work: PendingWork
    steps: Steps[Result]
    waited: MPI.Request


class Loop:
    """Interleaves one generator per busy channel until `close`, or the loss of a member.

    Args:
        requests: where the channels' requests come from.
        wakeup: notified when there may be a new one.
        begin: makes the generator of a request, which may report that it is about to end.
        num_channels: channels to serve.
        backoff: how to wait when nothing progresses.
        finalize: what MPI must still do after a good end.
        on_error: called with an exception of the thread, after all pending work has failed by it.
    """

    def __init__(
        self,
        requests: RequestQueue,
        wakeup: Wakeup,
        begin: Callable[[Request, Callable[[], None]], Steps[Result]],
        num_channels: int,
        backoff: Backoff,
        finalize: Callable[[], Steps[None]],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._requests = requests
        self._begin = begin
        self._backoff = backoff
        self._wakeup = wakeup
        self._finalize = finalize
        self._on_error = on_error
        self._tasks: list[Task | None] = [None] * num_channels
        self._num_busy = 0
        self._closing = False
        self._at: Request | None = None  # what the thread works on, which an error names
        self._traffic = Traffic()
        # A daemon, because a thread that waits for a killed rank inside MPI can never be joined.
        self._thread = threading.Thread(target=self._run, name="mpi", daemon=True)

    def start(self) -> None:
        """From here on all MPI calls happen on the loop's thread."""
        self._thread.start()

    @property
    def traffic(self) -> Traffic:
        """What the finished requests moved."""
        return self._traffic

    def close(self, timeout_s: float) -> None:
        """Finish what is in flight, finalize and end the thread.

        Raises:
            DeadlineExceeded: the thread did not end in time and no member is known to be lost.
        """
        self._closing = True
        self._wakeup.notify()
        # After a loss the thread ends at once, unless it is inside a blocking MPI call for ever.
        self._thread.join(min(timeout_s, JOIN_AFTER_LOSS_S) if self._requests.lost else timeout_s)
        if self._thread.is_alive() and not self._requests.lost:
            raise DeadlineExceeded(
                f"the MPI thread did not end within {timeout_s:g} s; expected every rank to close "
                "its backend after its last request; look for a rank that did not"
            )

    def _run(self) -> None:
        try:
            sleep_exactly()
            self._serve()
            if not self._requests.lost:
                self._end_in_order()
        except BaseException as error:
            named = error if self._at is None else _named(error, self._at)
            if named is not error and isinstance(named, RunFailed):  # without the place in code
                tell("".join(traceback.format_exception(error)))
            self._requests.fail_all(named)
            self._on_error(named)

    def _serve(self) -> None:
        check = True
        while not self._requests.lost:
            if check or self._wakeup.notified():
                self._start_idle()
            if self._num_busy == 0:
                if self._closing and not self._requests.busy:
                    return
                self._wakeup.wait()
                check = True
                continue
            progressed, check = self._advance_all()
            if progressed:
                self._backoff.reset()
            else:
                self._backoff.pause()

    def _end_in_order(self) -> None:
        for waited in self._finalize():
            while not waited.Test():
                if self._requests.lost:
                    return
                self._backoff.pause()

    def _start_idle(self) -> None:
        for channel, task in enumerate(self._tasks):
            while task is None:
                work = self._requests.take(channel)
                if work is None:
                    break
                task = self._launch(work)
                self._tasks[channel] = task
                self._num_busy += task is not None
        self._at = None

    def _launch(self, work: PendingWork) -> Task | None:
        """The task of a request, or None if it was over without waiting."""
        work.start()
        self._at = work.request
        steps = self._begin(work.request, partial(self._requests.let_next, work))
        try:
            return Task(work, steps, next(steps))
        except StopIteration as end:
            self._finish(work, end.value)
            return None

    def _advance_all(self) -> tuple[bool, bool]:
        """One step of each busy channel: (whether any progressed, whether any became idle)."""
        progressed = idle = False
        for channel, task in enumerate(self._tasks):
            if task is None:
                continue
            self._at = task.work.request
            if not task.waited.Test():
                continue
            progressed = True
            try:
                task.waited = next(task.steps)
            except StopIteration as end:
                self._tasks[channel] = None
                self._num_busy -= 1
                idle = True
                self._finish(task.work, end.value)
        self._at = None
        return progressed, idle

    def _finish(self, work: PendingWork, result: Result) -> None:
        self._traffic = self._traffic + result.traffic
        self._requests.finish(work, result)
