"""Copies of tensors outside the device: in pinned host memory, or for a CPU in mapped files."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable

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


class Transfers:
    """Moves bytes beside the computation: on a thread, or on a CUDA stream of its own.

    Args:
        to: where a CPU's bytes go.
    """

    def __init__(self, to: To = "shm") -> None:
        self.written_bytes = 0
        self._to = to
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stream: torch.cuda.Stream | None = None

    def copy(self, source: torch.Tensor) -> Copy:
        """Begin to move a flat tensor of bytes; keep it until the copy's `wait`."""
        self.written_bytes += source.nbytes
        return Copy(self, source)

    def place(self, source: torch.Tensor) -> torch.Tensor:
        """Memory outside the device for a tensor's bytes."""
        free = self._free[source.nbytes]
        if free:
            return free.pop()
        return zeros_on_host(source.nbytes, torch.uint8, source.device, self._to)

    def give_back(self, place: torch.Tensor) -> None:
        """The memory may be used again."""
        self._free[place.nbytes].append(place)

    def begin(self, source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
        """Begin a copy; returns what waits for its end."""
        device = source.device if source.device.type == "cuda" else target.device
        if device.type == "cuda":
            return self._begin_on_stream(source, target, device)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="transfers", daemon=True)
            self._thread.start()
        done = threading.Event()
        failure: list[BaseException] = []

        def move() -> None:
            try:
                target.numpy()[:] = source.numpy()
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
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        for tensor in (source, target):
            if tensor.device.type == "cuda":
                tensor.record_stream(self._stream)
        event = self._stream.record_event()
        return lambda: torch.cuda.current_stream(device).wait_event(event)

    def _work(self) -> None:
        while True:
            task = self._tasks.get()
            if task is None:
                return
            task()
            del task

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join()
            self._thread = None
