"""A job of ranks from start to end: whatever happens, nothing of it is left."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from testbed.launch import local, mpirun, tree
from testbed.launch.shared_memory import shared_memory


@dataclass(frozen=True)
class Started:
    """How ranks are to be started.

    Attributes:
        command: what each of them runs.
        size: how many.
        threads: torch threads of each.
        needs_mpi: their backend asks for an MPI launcher.
        hostfile: an Open MPI hostfile; None = all on this machine.
        one_machine: the hosts of the file are namespaces of this machine.
    """

    command: Sequence[str]
    size: int
    threads: int
    needs_mpi: bool
    hostfile: Path | None = None
    one_machine: bool = False


@dataclass(frozen=True)
class Over:
    """How a job ended.

    Attributes:
        status: what a shell would say: 0 well, 2 usage, 128 + signal interrupted.
        words: who ended first, and how; empty if all ended well or were interrupted.
        said: what the testbed itself wrote on the ranks' standard error.
    """

    status: int
    words: str = ""
    said: tuple[str, ...] = ()


def carry_out(started: Started, deadline_s: float) -> Over:
    """Start the ranks, wait for them and end all that is left of them.

    Args:
        started: the ranks.
        deadline_s: how long the others have to end by themselves once one has failed.
    """
    children: list[subprocess.Popen[bytes]] = []
    said: list[str] = []
    tee = tree.Tee()
    try:
        with shared_memory() as shared, tree.interruptible():
            try:
                children += _start(started, shared, tee.write_fd)
                ending = tree.wait_all(children, deadline_s, failing=tee.heard)
            finally:
                with tree.deaf():
                    tree.end_all(children)
                    said += tee.close(timeout_s=5)
    except tree.Interrupted as error:
        sys.stderr.write(f"testbed: {error}; ending all ranks\n")
        return Over(error.status)
    if ending.status == 0:
        return Over(0)
    who = "mpirun" if len(children) == 1 else f"rank {ending.culprit}, the first to end,"
    words = f"{who} {tree.status_of(ending.status)}"
    return Over(2 if ending.status == 2 else 1, words, tuple(said))


def _start(started: Started, shared: Path | None, errors: int) -> list[subprocess.Popen[bytes]]:
    command, size, threads = started.command, started.size, started.threads
    if not started.needs_mpi and started.hostfile is None:
        return local.start_ranks(command, size, threads, errors)
    hosts = mpirun.Hosts.given(started.hostfile, started.one_machine)
    return [mpirun.start_ranks(command, size, threads, hosts, errors, shared)]
