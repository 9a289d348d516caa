"""Whose rounds a channel carries: one conversation's after another's, the same on every rank."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

import torch

Owner = TypeVar("Owner")
Item = TypeVar("Item")


class ChannelOrder(Generic[Owner, Item]):
    """One channel's rounds, in an order that depends on nothing but the order of conversations.

    A ring matches requests by position. When the answer to a round is decoded differs from rank to
    rank, so a conversation that goes on keeps the channel until it has said that a round is its
    last; whoever came meanwhile waits in line.

    Example:
        >>> turns = ChannelOrder[str, str]()
        >>> turns.ask("a", "a1", last=False), turns.ask("b", "b1", last=True)
        (['a1'], [])
        >>> turns.ask("a", "a2", last=True)
        ['a2', 'b1']
    """

    def __init__(self) -> None:
        self._holder: Owner | None = None
        self._line: deque[tuple[Owner, Item, bool]] = deque()

    def ask(self, owner: Owner, item: Item, last: bool) -> list[Item]:
        """A conversation wants to submit; returns what may be submitted now, in order.

        Args:
            owner: the conversation.
            item: its round.
            last: it has no other after this one.
        """
        if self._holder is owner:
            self._holder = None if last else owner
            return [item, *self._admitted()]
        self._line.append((owner, item, last))
        return self._admitted()

    def leave(self, owner: Owner) -> list[Item]:
        """A conversation has ended, whatever it said before; returns what may be submitted now.

        Example:
            >>> turns = ChannelOrder[str, str]()
            >>> turns.ask("a", "a1", last=False), turns.ask("b", "b1", last=True)
            (['a1'], [])
            >>> turns.leave("b"), turns.leave("a")
            ([], ['b1'])
        """
        if self._holder is owner:
            self._holder = None
        return self._admitted()

    def _admitted(self) -> list[Item]:
        admitted: list[Item] = []
        while self._line and self._holder is None:
            owner, item, last = self._line.popleft()
            self._holder = None if last else owner
            admitted.append(item)
        return admitted


# A thread beside the training that computes what it is given, one task after another.

Task = Callable[[], None]


class WorkerThread:
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
        self.around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext

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
                with self.around():
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
