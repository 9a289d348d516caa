"""A job of ranks from start to end."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from testbed.launch import local, mpirun, tree
from testbed.launch.shared_memory import shared_memory


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
    """

    command: Sequence[str]
    size: int
    threads: int
    needs_mpi: bool
    hostfile: Path | None = None
    one_machine: bool = False

    @property
    def by_mpirun(self) -> bool:
        """Whether `mpirun` starts them."""
        return self.needs_mpi or self.hostfile is not None


@dataclass(frozen=True)
class Over:
    """How a job ended.

    Attributes:
        status: what a shell would say: 0 well, 1 failed, 2 usage, 128 + signal interrupted.
        words: who ended first, and how; empty if all ended well or were interrupted.
        said: what the testbed itself wrote on the ranks' standard error.
    """

    status: int
    words: str = ""
    said: tuple[str, ...] = ()


def run_job(job: Job, deadline_s: float) -> Over:
    """Start the ranks, wait for them and end all that is left of them.

    Ctrl-C is heard while they run. Whoever asks while they are started or ended must wait until
    that is done: until then nobody would know whom to end.

    Args:
        job: the ranks.
        deadline_s: how long the others have to end by themselves once one has failed.
    """
    children: list[subprocess.Popen[bytes]] = []
    said: list[str] = []
    ending = None
    with tree.interruptible() as ears, _memory(job) as shared:
        tee = tree.Tee()
        try:
            children += _start(job, shared, tee.write_fd)
            with ears.open():
                ending = tree.wait_all(children, deadline_s, failing=tee.heard)
        except tree.Interrupted as error:
            sys.stderr.write(f"testbed: {error}; ending all ranks\n")
            sys.stderr.flush()
        finally:
            tree.end_all(children)
            said += tee.close(timeout_s=5)
    interrupted = None if ears.asked is None else 128 + ears.asked
    if ending is None or ending.status == 0:
        return Over(interrupted or 0)
    who = "mpirun" if job.by_mpirun else f"rank {ending.culprit}, the first to end,"
    words = f"{who} {tree.status_of(ending.status)}"
    return Over(interrupted or (2 if ending.status == 2 else 1), words, tuple(said))


@contextlib.contextmanager
def _memory(job: Job) -> Iterator[Path | None]:
    """A folder for what MPI's ranks share, if they are all on this machine."""
    if not job.by_mpirun or not (job.hostfile is None or job.one_machine):
        yield None
        return
    with shared_memory() as folder:
        yield folder


def _start(job: Job, shared: Path | None, errors: int) -> list[subprocess.Popen[bytes]]:
    if not job.by_mpirun:
        return local.start_ranks(job.command, job.size, job.threads, errors)
    hosts = mpirun.Hosts.given(job.hostfile, job.one_machine)
    return [mpirun.start_ranks(job.command, job.size, job.threads, hosts, errors, shared)]
