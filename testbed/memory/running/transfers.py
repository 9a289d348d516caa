"""Copies of tensors outside the device: in pinned host memory, or for a CPU in mapped files."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

import torch

from testbed.memory.host import zeros_on_host
from testbed.memory.strategy import To


class Copy:
    """One tensor's bytes outside the device; its memory is used again when this is dropped."""

    def __init__(self, transfers: Transfers, source: torch.Tensor) -> None:
        self._transfers = transfers
        self._num_bytes, self._device = source.nbytes, source.device
        self._wait: Callable[[], None] = _nothing
        self._place: torch.Tensor | None = None
        place = self._place = transfers.place(source)
        self._wait = transfers.begin(source, place)

    def wait(self) -> None:
        """Until what was begun last has ended."""
        self._wait()
        self._wait = _nothing

    def read(self) -> torch.Tensor:
        """A tensor for the bytes; they are there after `wait`."""
        assert self._place is not None
        made = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._device)
        self._wait = self._transfers.begin(self._place, made)
        return made

    def __del__(self) -> None:
        if self._place is not None:
            self._wait()
            self._transfers.give_back(self._place)


def _nothing() -> None:
    """Nothing is under way."""


SLACK: Final = 1.25  # memory may be so much larger than what it is used for


class Transfers:
    """Moves bytes beside the computation: on a thread, or on a CUDA stream of its own.

    Memory that was given back is used again, for tensors that are a little smaller too, as where
    sequences differ in length. At most as much of it waits as was in use at once.

    Args:
        to: where a CPU's bytes go.
    """

    def __init__(self, to: To = "shm") -> None:
        self.written_bytes = 0
        self._to = to
        self._lock = threading.Lock()
        self._returned: deque[torch.Tensor] = deque()
        self._free: dict[int, list[torch.Tensor]] = {}  # by size; what was used last comes last
        self._free_bytes = self._used_bytes = self._most_bytes = 0
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._stream: torch.cuda.Stream | None = None

    @property
    def held_bytes(self) -> int:
        """Of memory outside the device, in use or waiting to be used again."""
        with self._lock:
            self._sort()
            return self._used_bytes + self._free_bytes

    def copy(self, source: torch.Tensor) -> Copy:
        """Begin to move a flat tensor of bytes; keep it until the copy's `wait`."""
        self.written_bytes += source.nbytes
        return Copy(self, source)

    def place(self, source: torch.Tensor) -> torch.Tensor:
        """Memory outside the device for a tensor's bytes, which are its first."""
        wanted = source.nbytes
        with self._lock:
            self._sort()
            size = wanted
            if wanted not in self._free:
                near = (free for free in self._free if wanted <= free <= wanted * SLACK)
                size = min(near, default=0)
            if size:
                place = self._take(size)
            else:
                place = zeros_on_host(wanted, torch.uint8, source.device, self._to)
            self._used_bytes += place.nbytes
            self._most_bytes = max(self._most_bytes, self._used_bytes)
            return place

    def give_back(self, place: torch.Tensor) -> None:
        """The memory may be used again; to be called from any thread, inside of others' calls."""
        self._returned.append(place)

    def _sort(self) -> None:
        """Take in what was given back, and let go of what has waited longest."""
        while self._returned:
            place = self._returned.popleft()
            same = self._free.pop(place.nbytes, [])
            same.append(place)
            self._free[place.nbytes] = same
            self._used_bytes -= place.nbytes
            self._free_bytes += place.nbytes
        while self._free_bytes > self._most_bytes:
            self._take(next(iter(self._free)))

    def _take(self, size: int) -> torch.Tensor:
        places = self._free[size]
        place = places.pop()
        if not places:
            del self._free[size]
        self._free_bytes -= size
        return place

    def begin(self, source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
        """Begin a copy; returns what waits for its end."""
        device = source.device if source.device.type == "cuda" else target.device
        if device.type == "cuda":
            return self._begin_on_stream(source, target, device)
        num_bytes = min(source.nbytes, target.nbytes)
        if self._is_closed:
            target.numpy()[:num_bytes] = source.numpy()[:num_bytes]
            return _nothing
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="transfers", daemon=True)
            self._thread.start()
        done = threading.Event()
        failure: list[BaseException] = []

        def move() -> None:
            try:
                target.numpy()[:num_bytes] = source.numpy()[:num_bytes]
            except BaseException as error:  # raised again by whoever waits
                failure.append(error)
            finally:
                done.set()

        def wait() -> None:
            done.wait()
            if failure:
                raise failure[0]

        self._tasks.put(move)
        return wait

    def _begin_on_stream(
        self, source: torch.Tensor, target: torch.Tensor, device: torch.device
    ) -> Callable[[], None]:
        num_bytes = min(source.nbytes, target.nbytes)
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            target[:num_bytes].copy_(source[:num_bytes], non_blocking=True)
        event, both = self._stream.record_event(), [source, target]

        def wait() -> None:
            # Both tensors are held until now, and what frees them comes after the copy on the
            # device. `record_stream` would withhold their memory until the copy has really run.
            torch.cuda.current_stream(device).wait_event(event)
            both.clear()

        return wait

    def _work(self) -> None:
        while True:
            task = self._tasks.get()
            if task is None:
                return
            task()
            del task

    def close(self) -> None:
        """End the thread; what is moved after that is moved on the caller's own."""
        self._is_closed = True
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join()
            self._thread = None
