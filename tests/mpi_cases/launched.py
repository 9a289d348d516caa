"""Shared by the scripts that tests start under mpirun: a control plane over MPI, and a group."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable

from mpi4py import MPI

from testbed.backends.protocol import Backend, Group
from testbed.control.protocol import Loss


class MpiControl:
    """A control plane for tests: all_gather on the main thread, announcements by a thread.

    Messages travel as pickles on communicators of their own; rank 0 relays announcements, so that
    they arrive everywhere in the same order.
    """

    STOP = "stop"

    def __init__(self) -> None:
        self._comm = MPI.COMM_WORLD.Dup()
        self._upward = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()
        self.loss: Loss | None = None
        self._listeners: dict[str, list[Callable[[bytes], None]]] = defaultdict(list)
        self._loss_callbacks: list[Callable[[Loss], None]] = []
        self.failures: list[str] = []
        self._thread = threading.Thread(target=self._hear, daemon=True)

    def start(self) -> MpiControl:
        self._thread.start()
        return self

    def all_gather(
        self, name: str, value: bytes, timeout_s: float, members: int | None = None
    ) -> list[bytes]:
        return self._comm.allgather(value)

    def announce(
        self, topic: str, value: bytes, members: int | None = None, *, others_alone: bool = False
    ) -> None:
        self._upward.send((topic, value), dest=0, tag=1)

    def listen(self, topic: str, callback: Callable[[bytes], None]) -> None:
        self._listeners[topic].append(callback)

    def report_failure(self, why: str) -> None:
        self.failures.append(why)

    def on_loss(self, callback: Callable[[Loss], None]) -> None:
        self._loss_callbacks.append(callback)

    def lose(self, loss: Loss) -> None:
        self.loss = loss
        for callback in self._loss_callbacks:
            callback(loss)

    def forget(self) -> None:
        """Start the next case without the loss of the last one."""
        self.loss = None
        self._loss_callbacks.clear()

    def close(self) -> None:
        """All ranks together, when nobody announces any more."""
        self._comm.Barrier()
        if self.rank == 0:
            self.announce(self.STOP, b"")
        self._thread.join(10)

    def _hear(self) -> None:
        while True:
            topic, value = self._receive()
            if topic == self.STOP:
                return
            for callback in self._listeners[topic]:
                callback(value)

    def _receive(self) -> tuple[str, bytes]:
        pause = threading.Event()
        source, tag = (MPI.ANY_SOURCE, 1) if self.rank == 0 else (0, 2)
        while not self._upward.iprobe(source=source, tag=tag):
            pause.wait(0.001)  # a thread that blocks inside MPI would keep a core busy
        said = self._upward.recv(source=source, tag=tag)
        if self.rank == 0:
            for other in range(1, self.size):
                self._upward.send(said, dest=other, tag=2)
        return said


def open_backend(spec: str, control: MpiControl, **group: object) -> Backend:
    """Open `name:options` from the registry for all ranks of the launcher."""
    from testbed.base.axes import BACKENDS

    opened: Backend = BACKENDS.resolve(spec).build(
        Group(control.rank, control.size, control, **group)
    )
    return opened
