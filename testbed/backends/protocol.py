"""The one protocol behind which servers and rings are interchangeable.

A backend has one required op, `submit(Request) -> Work`, and declares the rest. Requests of one
channel run one after another in the order in which they were submitted (which all ranks must
share) or, when opened with `order=priority`, in the order that rank 0 decides and announces.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from testbed.base.errors import DeadlineExceeded
from testbed.base.recorder import Recorder
from testbed.base.types import Capabilities, Event, Request, Result, Traffic
from testbed.control.protocol import Control

if TYPE_CHECKING:
    import torch

Order = Literal["fifo", "priority"]


class Work(Protocol):
    """An exchange under way."""

    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once."""
        ...

    def wait(self, timeout_s: float | None = None) -> Result:
        """The result; blocks without keeping a core busy.

        Args:
            timeout_s: seconds to wait at most; None = the group's deadline.

        Raises:
            RankLost: a member of the job was lost; names it and this request.
            DeadlineExceeded: not done within the time; the request stays under way.
        """
        ...

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` when it is done, on the backend's thread; at once if it already is."""
        ...

    @property
    def event(self) -> Event:
        """When it was submitted, started and ended; valid once done."""
        ...


class PendingResult:
    """The waiting half of `Work`; another thread ends it.

    It ends once, by `finish` or by `fail`; a second one is ignored, so that a failure of all
    pending work does not replace a result.

    Args:
        what: is waited for, in words.
        deadline_s: of a `wait` without `timeout_s`; None = no limit.

    Attributes:
        stage: what is being done for it, in words; empty if unknown.
    """

    def __init__(self, what: object, deadline_s: float | None = None) -> None:
        self.stage = ""
        self._what = what
        self._deadline_s = deadline_s
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._listeners: list[Callable[[], None]] = []
        self._ended_s = time.perf_counter()

    def finish(self, result: Result) -> None:
        """The result is in place."""
        self._end(result, None)

    def fail(self, error: BaseException) -> None:
        """There will be no result."""
        self._end(None, error)

    def _end(self, result: Result | None, error: BaseException | None) -> None:
        with self._lock:
            if self._done.is_set():
                return
            self._result, self._error = result, error
            self._ended_s = time.perf_counter()
            self._done.set()
            listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener()

    def when_done(self, callback: Callable[[], None]) -> None:
        """See `Work.when_done`."""
        with self._lock:
            if not self._done.is_set():
                self._listeners.append(callback)
                return
        callback()

    def done(self) -> bool:
        """See `Work.done`."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> Result:
        """See `Work.wait`."""
        limit_s = self._deadline_s if timeout_s is None else timeout_s
        if not self._done.wait(limit_s):
            stage = f"it is {self.stage}; " if self.stage else ""
            raise DeadlineExceeded(
                f"{self._what} was not done within {limit_s:g} s; {stage}no rank is known to be "
                "lost; raise --deadline if the network is that slow"
            )
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


class Backend(Protocol):
    """An opened backend, as the trainer sees it."""

    rank: int
    size: int
    capabilities: Capabilities

    def submit(self, request: Request) -> Work:
        """Start (or queue) an exchange; never blocks on the network.

        Raises:
            UsageError: an op, channel, dtype or layout that this backend did not declare.
        """
        ...

    def traffic(self) -> Traffic:
        """Bytes that this rank (with its colocated server) moved since it was opened."""
        ...

    def close(self, timeout_s: float = 10.0) -> None:
        """End threads, sockets and helper processes; all requests must be done."""
        ...


@runtime_checkable
class ExternalFramework(Backend, Protocol):
    """A backend that is another framework: gradients are exchanged by its own hooks, not by plan.

    Its ops serve what surrounds the training: equal starts, and measuring the link.
    """

    @property
    def fixed_graph(self) -> bool:
        """Whether parameters that the first step does not use may stay unused in all others."""
        ...

    @property
    def raises_late(self) -> bool:
        """Whether an exchange that stands still raises; else whoever trains has to watch it."""
        ...

    def wrap(self, model: torch.nn.Module, timeout_s: float) -> torch.nn.Module:
        """The model with the framework's hooks, to be called instead of it; collective.

        Args:
            model: built alike on all ranks; rank 0's parameters replace the others'.
            timeout_s: see `set_timeout`.
        """
        ...

    def hold_back(self) -> AbstractContextManager[None]:
        """Within it, backward passes only add to the gradients."""
        ...

    def set_timeout(self, timeout_s: float) -> None:
        """How long its exchanges may stand still before it raises in the thread that trains."""
        ...

    def broke(self, error: BaseException) -> bool:
        """Whether an error says that an exchange stood still so long, or that a rank closed it."""
        ...

    def count_step(self) -> None:
        """A step's gradients were exchanged: count their bytes."""
        ...


@dataclass(frozen=True)
class Group:
    """The job as one rank sees it: given to a backend when it is opened.

    Attributes:
        rank: this worker, 0 .. size - 1.
        size: number of workers.
        control: the control plane; has `size + num_servers` members, workers first.
        num_servers: dedicated server processes of the job (0 = none).
        host: this machine's name; ranks with the same one share a machine.
        address: the job's own interface on this machine: the only one to bind to.
        token: secret of the job; frames that lack it are refused.
        deadline_s: how long any wait may take.
        latency_s: real seconds that every exchange waits before it starts, where an emulated
            cluster was asked for that and not for a network's latency (see `DelayedBackend`); 0 =
            none.
        jitter_s: largest deviation from them.
        name: of this opened backend on the control plane; unique within the job.
        order: how a channel picks its next request.
        num_channels: channels that will be used.
        credit_bytes: with `priority`: bytes that may be chosen ahead on a channel; None = one
            request at a time.
        device: `cpu`, or `cuda:<index>`.
        hosts: host of every worker, in rank order; empty = all on `host`.
        server_hosts: host of every dedicated server.
        recorder: takes what the backend alone knows of exchanges; None = nothing is recorded.
    """

    rank: int
    size: int
    control: Control
    num_servers: int = 0
    host: str = "localhost"
    address: str = "127.0.0.1"
    token: bytes = b""
    deadline_s: float = 30.0
    order: Order = "fifo"
    num_channels: int = 1
    credit_bytes: int | None = None
    device: str = "cpu"
    hosts: tuple[str, ...] = ()
    server_hosts: tuple[str, ...] = ()
    latency_s: float = 0.0
    jitter_s: float = 0.0
    name: str = "backend"
    recorder: Recorder | None = None

    @property
    def own_host(self) -> str:
        """The host of this rank, a worker."""
        return self.hosts[self.rank] if self.hosts else self.host

    @property
    def machine(self) -> str:
        """This machine: its boot, or where Linux does not tell, the host's name.

        Nodes of an emulated cluster are hosts of one machine, and share its cores.
        """
        boot = Path("/proc/sys/kernel/random/boot_id")
        return boot.read_text().strip() if boot.exists() else self.own_host
