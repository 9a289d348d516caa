"""A job of ranks from start to end."""

from __future__ import annotations

import contextlib
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from testbed.base.folders import held_folder_or_none
from testbed.forking import fork_server, through_stub
from testbed.launch import mpirun, processes
from testbed.launch.mpirun import shared_memory
from testbed.records.progress import VARIABLE, read_progress, run_bar

# Starts the ranks of a job as processes of this machine, without any MPI.


def rank_environment(
    base: Mapping[str, str], rank: int, size: int, hub: tuple[str, int], token: str, threads: int
) -> dict[str, str]:
    """The variables that make a process rank `rank` of a job of `size`."""
    return {
        **base,
        "TESTBED_RANK": str(rank),
        "TESTBED_SIZE": str(size),
        "TESTBED_LOCAL_RANK": str(rank),
        "TESTBED_LOCAL_SIZE": str(size),
        "TESTBED_HUB": f"{hub[0]}:{hub[1]}",
        "TESTBED_TOKEN": token,
        "OMP_NUM_THREADS": base.get("OMP_NUM_THREADS", str(threads)),
    }


def start_ranks(
    command: Sequence[str],
    size: int,
    threads: int,
    base: Mapping[str, str],
    errors: int | None = None,
    output: int | None = None,
) -> list[subprocess.Popen[bytes]]:
    """Start `size` processes of one command; rank 0 inherits the control plane's socket."""
    token = secrets.token_hex(16)
    children: list[subprocess.Popen[bytes]] = []
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as failing:
        failing.callback(processes.end_all, children)
        for rank in range(size):
            environment = rank_environment(
                base, rank, size, listener.getsockname()[:2], token, threads
            )
            descriptors: tuple[int, ...] = ()
            if rank == 0:
                environment["TESTBED_LISTENER"] = str(listener.fileno())
                descriptors = (listener.fileno(),)
            children.append(
                processes.start(
                    command, environment, pass_fds=descriptors, errors=errors, output=output
                )
            )
        failing.pop_all()  # all have started: they are the caller's
    return children


@dataclass(frozen=True)
class Job:
    """Ranks to start.

    Attributes:
        command: what each of them runs.
        size: how many.
        threads: torch threads of each.
        needs_mpi: their backend asks for an MPI launcher.
        hostfile: an Open MPI hostfile; None = all on this machine.
        one_machine: the hosts of the file are namespaces of this machine.
        modules: what they will load sooner or later.
        quiet: nobody is told how far they are.
    """

    command: Sequence[str]
    size: int
    threads: int
    needs_mpi: bool
    hostfile: Path | None = None
    one_machine: bool = False
    modules: Sequence[str] = ()
    quiet: bool = False

    @property
    def by_mpirun(self) -> bool:
        """Whether `mpirun` starts them."""
        return self.needs_mpi or self.hostfile is not None


@dataclass(frozen=True)
class JobResult:
    """How a job ended.

    Attributes:
        status: what a shell would say: 0 well, 1 failed, 2 usage, 128 + signal interrupted.
        words: who ended first, and how; empty if all ended well or were interrupted.
        said: what the testbed itself wrote on the ranks' standard error.
    """

    status: int
    words: str = ""
    said: tuple[str, ...] = ()


def run_job(job: Job, deadline_s: float) -> JobResult:
    """Start the ranks, wait for them and end all that is left of them.

    Ctrl-C is heard while they run. Whoever asks while they are started or ended must wait until
    that is done: until then nobody would know whom to end.

    Args:
        job: the ranks.
        deadline_s: of the run; a lost rank is told within half of it, and the others then have the
            other half to end by themselves.
    """
    children: list[subprocess.Popen[bytes]] = []
    said: list[str] = []
    ending = None
    with (
        processes.interruptible() as ears,
        _memory(job) as shared,
        _forking(job) as variables,
        _bar(variables, sys.stderr, quiet=job.quiet) as base,
    ):
        tee = processes.Tee()
        # What ranks print goes above the bar, through this process.
        printed = processes.Tee(lambda: sys.stdout) if base != variables else None
        try:
            output = None if printed is None else printed.write_fd
            children += _start(job, base, shared, (tee.write_fd, output))
            with ears.open():
                ending = processes.wait_all(children, 0.5 * deadline_s, failing=tee.heard)
        except processes.Interrupted as error:
            sys.stderr.write(f"testbed: {error}; ending all ranks\n")
            sys.stderr.flush()
        finally:
            processes.end_all(children)
            said += tee.close(timeout_s=5)
            if printed is not None:
                printed.close(timeout_s=5)
    interrupted = None if ears.asked is None else 128 + ears.asked
    if ending is None or ending.status == 0:
        return JobResult(interrupted or 0)
    who = "mpirun" if job.by_mpirun else f"rank {ending.culprit}, the first to end,"
    words = f"{who} {processes.status_of(ending.status)}"
    if first := ending.first:
        told = f"rank {first.culprit} {processes.status_of(first.status)}, seen a moment earlier"
        words = f"rank {ending.culprit} {processes.status_of(ending.status)} ({told})"
    return JobResult(interrupted or (2 if ending.status == 2 else 1), words, tuple(said))


@contextlib.contextmanager
def _memory(job: Job) -> Iterator[Path | None]:
    """A folder for what MPI's ranks share, if they are all on this machine."""
    if not job.by_mpirun or not (job.hostfile is None or job.one_machine):
        yield None
        return
    with shared_memory() as folder:
        yield folder


@contextlib.contextmanager
def _forking(job: Job) -> Iterator[dict[str, str]]:
    """The variables of the ranks; those on this machine, if several, are forked from a server."""
    base = processes.base_environment()
    if job.hostfile is not None or job.size < 2:
        yield base
        return
    with fork_server({"OMP_NUM_THREADS": str(job.threads), **base}) as variables:
        yield variables


@contextlib.contextmanager
def _bar(base: Mapping[str, str], out: TextIO, *, quiet: bool = False) -> Iterator[dict[str, str]]:
    """Show at a terminal how far the job is that runs inside; gives the variables of its ranks.

    Args:
        base: variables of the ranks so far; where they ask for a file already, it is left to
            whoever reads that.
        out: the stream; ranks tell plain lines by themselves where it is no terminal.
        quiet: nothing is shown.
    """
    if quiet or VARIABLE in base or not out.isatty():
        yield dict(base)
        return
    where = Path(tempfile.gettempdir())
    with held_folder_or_none(where, "testbed-progress-", ".held") as folder:
        if folder is None:
            yield dict(base)
            return
        path = folder / "progress"
        path.touch()  # rank 0 writes where it finds a file
        with run_bar(lambda: read_progress(path), out):
            yield {**base, VARIABLE: str(path)}


def _start(
    job: Job, base: Mapping[str, str], shared: Path | None, streams: tuple[int, int | None]
) -> list[subprocess.Popen[bytes]]:
    command = job.command if job.hostfile else through_stub(job.command, base, job.modules)
    if not job.by_mpirun:
        return start_ranks(command, job.size, job.threads, base, *streams)
    hosts = mpirun.Hosts.given(job.hostfile, job.one_machine)
    return [mpirun.start_ranks(command, job.size, job.threads, base, hosts, *streams, shared)]
