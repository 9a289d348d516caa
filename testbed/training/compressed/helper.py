"""A thread beside the training that computes what it is given, one task after another."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator

import torch

Task = Callable[[], None]


class Helper:
    """A thread of its own; it starts with the first task and ends with `close`.

    On a GPU its kernels run on a stream of their own, beside those of the training.

    Args:
        name: of the thread.
        device: where its tasks compute.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._name = name
        self._device = device
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def give(self, task: Task) -> None:
        """Do this after all that was given before; a task must not raise. Ignored once closed."""
        with self._lock:
            if self._closed:
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            self._tasks.put(task)

    def close(self) -> None:
        """End the thread, after the task that it is at; what was not begun is not done."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._tasks.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _work(self) -> None:
        with torch.no_grad(), _stream_on(self._device):
            while not self._closed:
                task = self._tasks.get()
                if task is None:
                    return
                task()
                del task  # else what it holds lives until the next one comes


def made_on(device: torch.device) -> Callable[[], None]:
    """Waits until a GPU has done what the caller's stream has queued up to now; else nothing."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event.synchronize


@contextlib.contextmanager
def _stream_on(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
