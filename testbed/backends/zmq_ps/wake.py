"""Waking a thread that waits in a poll, from any other thread."""

from __future__ import annotations

import contextlib
import socket
import threading


class Waker:
    """A socket pair: `wake` makes `fd` readable until `drain`; harmless once closed."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._lock = threading.Lock()
        self._closed = False
        self.fd = self._reader.fileno()

    def wake(self) -> None:
        """Make the waiting thread run."""
        with self._lock:
            if not self._closed:
                # A full buffer means that the thread has been woken and did not run yet.
                with contextlib.suppress(BlockingIOError):
                    self._writer.send(b"!")

    def drain(self) -> None:
        """Forget all wakes so far."""
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def close(self) -> None:
        """Give the descriptors back."""
        with self._lock:
            self._closed = True
            self._reader.close()
            self._writer.close()
