"""Ranks that are started once, through the project's own launchers, and run many cases.

`RankPool` is one job; `PoolKeeper` holds the few that live at a time. A pool in which a case did
not end in time, or a rank died, is ended and never used again.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec
import psutil
import pytest
import torch

from testbed.backends.protocol import Group
from testbed.base.axes import BACKENDS
from testbed.control.inproc import InprocHub
from testbed.forking import through_stub
from testbed.launch import mpirun, processes
from testbed.launch.identity import Identity
from testbed.launch.job import start_ranks
from testbed.launch.join import Role
from testbed.launch.mpirun import shared_memory
from tests.harness.family import belongs, descendants
from tests.harness.rank_agent import Agent, Answer, Case, Leave, Setup
from tests.harness.rank_main import JobSettings
from tests.harness.wire import receive_object, send_object

MODULES = ("tests.harness.rank_main", "torch._dynamo", "zmq")
ROOT = Path(__file__).parents[2]
START_S = 90.0
DEADLINE_S = 40.0


@dataclass(frozen=True)
class Job:
    """What a pool is started for."""

    backend: str
    num_ranks: int
    setup: Setup
    device: str = "cpu"


class BrokenPool(AssertionError):
    """A rank died or did not answer in time; the pool is gone."""


class CaseFailed(AssertionError):
    """A case raised on at least one rank; the pool is gone."""


class Ranks(Protocol):
    """The ranks of one job, as threads or processes."""

    def send(self, rank: int, command: Case | Leave) -> None: ...

    def receive(self, rank: int, end_s: float) -> Answer: ...

    def end(self) -> None: ...

    def log(self) -> str: ...

    def children(self) -> set[int]: ...

    def threads(self) -> list[threading.Thread]: ...

    def descriptors(self) -> set[int]: ...


class RankPool:
    """The ranks of one job and whether they can still be used."""

    def __init__(self, job: Job) -> None:
        self.job = job
        backend = BACKENDS.resolve(job.backend).usable()
        self.facts, self.options = backend.facts, backend.options
        self.usable = True
        self.ended_by_itself = False
        self.ranks: Ranks = (
            ThreadRanks(job) if self.facts.in_process else ProcessRanks(job, self.facts.needs_mpi)
        )

    @property
    def num_servers(self) -> int:
        return self.facts.num_servers

    def answers(
        self, function: str, *args: Any, setup: Setup | None = None, within_s: float = 60.0
    ) -> list[Answer | None]:
        """Every rank's answer, None from a rank that died; ranks that hang break the pool.

        A case that asks a third party's backend for what that does not declare is skipped.
        """
        setup = setup or self.job.setup
        if setup.num_channels > 1 and shares_gpu(self.job):
            pytest.skip("ranks that share a GPU have one channel of NCCL")
        for rank in range(self.job.num_ranks):
            self.ranks.send(rank, Case(setup, function, args))
        end_s = time.monotonic() + within_s
        found: list[Answer | None] = []
        for rank in range(self.job.num_ranks):
            try:
                found.append(self.ranks.receive(rank, end_s))
            except EOFError:
                found.append(None)
            except TimeoutError:
                self.discard()
                raise BrokenPool(
                    f"{self.job}: rank {rank} did not end {function}{args} in {within_s:g} s\n"
                    f"{self.ranks.log()}"
                ) from None
        reason = why_skipped(self.job.backend, found)
        if reason:
            self.discard()
            pytest.skip(reason)
        return found

    def run(
        self, function: str, *args: Any, setup: Setup | None = None, within_s: float = 60.0
    ) -> list[Any]:
        """Call `function(backend, group, *args)` on all ranks; their results in rank order.

        Raises:
            CaseFailed: it raised on a rank.
            BrokenPool: a rank died or did not answer within `within_s`.
        """
        found = self.answers(function, *args, setup=setup, within_s=within_s)
        errors = [f"rank {a.rank}: {a.error}" for a in found if a is not None and a.error]
        dead = [rank for rank, answer in enumerate(found) if answer is None]
        if dead:
            self.discard()
            raise BrokenPool(
                "\n".join([f"{self.job}: rank {dead} died", *errors, self.ranks.log()])
            )
        if errors:
            self.discard()  # the ranks may have stopped at different points
            raise CaseFailed("\n".join([f"{self.job}: {function}{args}", *errors]))
        results: list[Any] = [answer.result for answer in found if answer is not None]
        return results

    def leave(self, within_s: float = 30.0) -> list[Answer | None]:
        """Ask the ranks that still answer to close and end; then whatever is left is ended."""
        answers: list[Answer | None] = []
        end_s = time.monotonic() + within_s
        try:
            for rank in range(self.job.num_ranks):
                with contextlib.suppress(OSError):
                    self.ranks.send(rank, Leave())
            for rank in range(self.job.num_ranks):
                try:
                    answers.append(self.ranks.receive(rank, end_s))
                except (EOFError, TimeoutError):
                    answers.append(None)
        finally:
            self.ended_by_itself = not self.await_end(end_s)
            self.discard()
        return answers

    def await_end(self, end_s: float) -> list[psutil.Process]:
        """The processes that have not ended by themselves in time."""
        limit_s = max(0.0, end_s - time.monotonic())
        alive: list[psutil.Process] = psutil.wait_procs(self.processes(), limit_s)[1]
        return alive

    def processes(self) -> list[psutil.Process]:
        """Those of its ranks, launchers and servers that live."""
        owners, found = frozenset(self.ranks.children()), []
        for pid in filter(lambda pid: belongs(pid, owners), descendants()):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(pid))
        return found

    def discard(self) -> None:
        """End everything that belongs to the pool; it is not used again."""
        self.usable = False
        self.ranks.end()


def shares_gpu(job: Job) -> bool:
    """Whether ranks of NCCL share one."""
    return job.backend == "nccl" and job.num_ranks > torch.cuda.device_count()


def why_skipped(backend: str, found: Sequence[Answer | None]) -> str:
    """Why a case does not concern a backend of a third party; "" where it does.

    It does not if all ranks failed because the backend did not declare an operation or a channel.
    The project's own backends are never excused.
    """
    if BACKENDS.resolve(backend).name in BACKENDS.builtin:
        return ""
    reasons = {"" if answer is None else answer.not_declared for answer in found}
    return "" if "" in reasons else "; ".join(sorted(reasons))


class ThreadRanks:
    """Ranks that are threads of the test process."""

    def __init__(self, job: Job) -> None:
        backend = BACKENDS.resolve(job.backend)
        hub = InprocHub(job.num_ranks)
        self._inboxes: list[queue.SimpleQueue[Case | Leave]] = []
        self._outboxes: list[queue.SimpleQueue[Answer]] = []
        self._threads: list[threading.Thread] = []
        self._strangers = set(threading.enumerate())
        for rank in range(job.num_ranks):
            identity = Identity("alone", rank, job.num_ranks, rank, job.num_ranks, {})
            role = Role(identity, backend, job.num_ranks, 0)
            group = Group(
                rank,
                job.num_ranks,
                hub.member(rank),
                deadline_s=0.8 * DEADLINE_S,
                hosts=("localhost",) * job.num_ranks,
            )
            inbox: queue.SimpleQueue[Case | Leave] = queue.SimpleQueue()
            outbox: queue.SimpleQueue[Answer] = queue.SimpleQueue()
            self._inboxes.append(inbox)
            self._outboxes.append(outbox)
            thread = threading.Thread(
                target=_work, args=(Agent(role, group), inbox, outbox), daemon=True
            )
            self._threads.append(thread)
        for thread in self._threads:
            thread.start()

    def send(self, rank: int, command: Case | Leave) -> None:
        self._inboxes[rank].put(command)

    def receive(self, rank: int, end_s: float) -> Answer:
        try:
            return self._outboxes[rank].get(timeout=max(0.001, end_s - time.monotonic()))
        except queue.Empty:
            raise TimeoutError from None

    def end(self) -> None:
        """Let the threads end that can; one inside a case stays, and the leak check reports it."""
        for inbox, thread in zip(self._inboxes, self._threads, strict=True):
            if thread.is_alive():
                inbox.put(Leave())
        for thread in self._threads:
            thread.join(5.0)

    def log(self) -> str:
        return ""

    def children(self) -> set[int]:
        return set()

    def threads(self) -> list[threading.Thread]:
        """The ranks and whatever threads their backends started since."""
        return [t for t in threading.enumerate() if t not in self._strangers]

    def descriptors(self) -> set[int]:
        return set()


def _work(
    agent: Agent, inbox: queue.SimpleQueue[Case | Leave], outbox: queue.SimpleQueue[Answer]
) -> None:
    command: Case | Leave | None = None
    while not isinstance(command, Leave):
        command = inbox.get()
        outbox.put(agent.perform(command))


class ProcessRanks:
    """Ranks that are processes, started by the project's launcher or by mpirun."""

    def __init__(self, job: Job, needs_mpi: bool) -> None:
        size = job.num_ranks + BACKENDS.resolve(job.backend).facts.num_servers
        self._folder = Path(tempfile.mkdtemp(prefix="ranks"))
        self._log = (self._folder / "log").open("wb+")
        self._memory = contextlib.ExitStack()
        self._children: list[subprocess.Popen[bytes]] = []
        self._connections: dict[int, socket.socket] = {}
        address = str(self._folder / "socket")
        settings = JobSettings(
            address,
            job.backend,
            job.num_ranks,
            job.setup.order,
            job.setup.num_channels,
            DEADLINE_S,
            job.device,
        )
        command = [sys.executable, "-m", "tests.harness.rank_main"]
        command.append(msgspec.json.encode(settings).decode())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                listener.bind(address)
                listener.listen(size)
                base = importable(processes.base_environment())
                command = through_stub(command, base, MODULES)
                errors = self._log.fileno()
                shared = self._memory.enter_context(shared_memory()) if needs_mpi else None
                self._children = (
                    [mpirun.start_ranks(command, size, 1, base, errors=errors, shared=shared)]
                    if needs_mpi
                    else start_ranks(command, size, 1, base, errors=errors)
                )
                self._welcome(listener, job)
        except BaseException:
            self.end()
            raise

    def _welcome(self, listener: socket.socket, job: Job) -> None:
        end_s = time.monotonic() + START_S
        listener.settimeout(0.2)
        while len(self._connections) < job.num_ranks:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                ended = [child.returncode for child in self._children if child.poll() is not None]
                if ended or time.monotonic() > end_s:
                    words = f"ended with {ended}" if ended else f"did not come in {START_S:g} s"
                    raise BrokenPool(f"{job}: ranks {words}\n{self.log()}") from None
                continue
            self._connections[receive_object(connection, end_s)] = connection

    def send(self, rank: int, command: Case | Leave) -> None:
        send_object(self._connections[rank], command)

    def receive(self, rank: int, end_s: float) -> Answer:
        answer: Answer = receive_object(self._connections[rank], end_s)
        return answer

    def end(self) -> None:
        processes.end_all(self._children)
        self._memory.close()
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        if not self._log.closed:
            self._text = self.log()
            self._log.close()
            shutil.rmtree(self._folder)

    def log(self) -> str:
        """What launcher and ranks wrote."""
        if self._log.closed:
            return self._text
        data = os.pread(self._log.fileno(), 1 << 20, 0)
        return data.decode(errors="replace")

    def children(self) -> set[int]:
        """The ids of those processes that this one started."""
        return {child.pid for child in self._children if child.poll() is None}

    def threads(self) -> list[threading.Thread]:
        return []

    def descriptors(self) -> set[int]:
        log = set() if self._log.closed else {self._log.fileno()}
        return log | {c.fileno() for c in self._connections.values()}


def importable(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of a process that finds the tests wherever pytest was started."""
    folders = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(folders)}


class PoolKeeper:
    """The pools that live, least recently used first; ends the oldest beyond `max_live`."""

    def __init__(self, max_live: int = 2) -> None:
        self._max_live = max_live
        self._live: OrderedDict[Job, RankPool] = OrderedDict()

    def get(self, job: Job) -> RankPool:
        """A usable pool for this job."""
        pool = self._live.pop(job, None)
        if pool is None or not pool.usable:
            while len(self._live) >= self._max_live:
                self._live.popitem(last=False)[1].leave()
            pool = RankPool(job)
        self._live[job] = pool
        return pool

    def with_setup(self, job: Job, setup: Setup) -> RankPool:
        """A pool whose ranks can open a backend in this way.

        Dedicated servers serve the one backend of their job, so these get a job of their own.
        """
        servers = BACKENDS.resolve(job.backend).facts.num_servers
        return self.get(replace(job, setup=setup) if servers else job)

    def live(self) -> list[RankPool]:
        """Pools whose threads, processes and descriptors are no leaks."""
        self._live = OrderedDict((j, p) for j, p in self._live.items() if p.usable)
        return list(self._live.values())

    def close(self) -> None:
        """End all."""
        for pool in self._live.values():
            if pool.usable:
                pool.leave()
        self._live.clear()
