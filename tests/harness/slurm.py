"""A Slurm cluster of one node, this machine, whose daemons live as long as the tests."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.harness.runs import Finished

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "sinfo")
PROGRAMS += ("squeue",)
# Debian keeps daemons where an ordinary user's PATH does not look.
SEARCHED = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
START_S = 30.0
NODE = socket.gethostname().partition(".")[0]

# No cgroup, no systemd, no accounting, no CPU binding: a container offers none of them. PMIx's
# clients know the node by the host's own name, so the node has that name.
CONFIGURATION = """\
ClusterName=testbed
SlurmctldHost={node}(127.0.0.1)
SlurmctldPort={control_port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
KillWait=2
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=1
NodeName={node} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def absent(reason: str) -> None:
    """Skip the test; or fail it where the launchers were installed on purpose."""
    if os.environ.get("TESTBED_REQUIRE_LAUNCHERS"):
        pytest.fail(f"TESTBED_REQUIRE_LAUNCHERS is set, but {reason}")
    pytest.skip(reason)


def program(name: str) -> str | None:
    return shutil.which(name, path=SEARCHED)


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if program(name) is None]


def until(
    condition: Callable[[], bool], what: str, within_s: float = START_S, every_s: float = 0.05
) -> None:
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, f"no {what} within {within_s:g} s"
        time.sleep(every_s)


@dataclass(frozen=True)
class Slurm:
    """The cluster.

    Attributes:
        folder: everything that its daemons keep.
        environment: the variables by which its commands find it.
    """

    folder: Path
    environment: Mapping[str, str]

    def run(self, *command: str, within_s: float = 100.0) -> Finished:
        """A command to its end; what it leaves in the queue is the caller's."""
        path = program(command[0])
        assert path is not None
        done = subprocess.run(
            [path, *command[1:]],
            capture_output=True,
            text=True,
            timeout=within_s,
            env=dict(self.environment),
        )
        return Finished(done.returncode, done.stdout, done.stderr)

    def batch(self, *words: str, within_s: float = 100.0) -> str:
        """Submit a job and wait until it is over: its exit codes, each once, as Slurm shows them.

        `sbatch --wait` asks every ten seconds.
        """
        done = self.run("sbatch", "--parsable", *words)
        assert done.status == 0, done.err
        job = done.out.strip()
        self.ends(within_s)
        shown = self.run("scontrol", "show", "job", job).out
        return " ".join(sorted(set(re.findall(r" ExitCode=(\S+)", shown))))

    def ends(self, within_s: float) -> None:
        """Wait until no job is left."""
        until(lambda: not self.queue(), f"end of the jobs\n{self.logs()}", within_s, every_s=0.2)

    def needs_pmix(self) -> None:
        """Skip the test where Slurm finds no PMIx library."""
        said = self.run("srun", "--mpi=list")
        if "pmix" not in said.out + said.err:
            absent("Slurm finds no PMIx library (Debian: libpmix-dev)")

    def queue(self) -> list[str]:
        """Jobs that are not over: `<job or job_task> <state>`."""
        said = self.run("squeue", "--noheader", "--array", "--format=%i %T", "--states=all")
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        return [line for line in said.out.splitlines() if not line.endswith(over)]

    def logs(self) -> str:
        tails = [f"{p.name}: ...{p.read_text()[-600:]}" for p in self.folder.glob("*.log")]
        return "\n".join(tails)


@contextlib.contextmanager
def running_slurm(folder: Path) -> Iterator[Slurm]:
    """Start munged, slurmctld and slurmd, each in the foreground; in the end none is left."""
    for name in ("state", "spool", "pmix"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    configuration = folder / "slurm.conf"
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM", "SBATCH", "SRUN", "OMPI_", "PMI"))
    }
    path = f"{Path(sys.executable).parent}{os.pathsep}{SEARCHED}"
    environment |= {"SLURM_CONF": str(configuration), "PATH": path, "OMP_NUM_THREADS": "1"}
    cluster = Slurm(folder, environment)
    control_port, node_port = free_ports(2)
    configuration.write_text(
        CONFIGURATION.format(
            folder=folder,
            node=NODE,
            user=psutil.Process().username(),
            control_port=control_port,
            node_port=node_port,
            cpus=max(8, os.cpu_count() or 1),
        )
    )
    (folder / "mpi.conf").write_text(f"PMIxCliTmpDirBase={folder}/pmix\n")
    munge = [f"--{n}={folder}/munge.{n.split('-')[0]}" for n in ("socket", "key-file", "pid-file")]
    munge += [f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed"]
    daemons: list[subprocess.Popen[bytes]] = []

    def start(name: str, *options: str) -> None:
        path = program(name)
        assert path is not None
        with (folder / f"{name}.out").open("wb") as out:
            daemons.append(
                subprocess.Popen([path, *options], env=environment, stdout=out, stderr=out)
            )

    try:
        # A temporary folder that is its owner's alone is more private than munged asks for.
        start("munged", "--foreground", "--force", *munge)
        until((folder / "munge.socket").exists, f"socket of munged\n{cluster.logs()}")
        start("slurmctld", "-D")
        start("slurmd", "-D")
        until(
            lambda: cluster.run("sinfo", "--noheader", "--format=%T").out.strip() == "idle",
            f"idle node\n{cluster.logs()}",
        )
        yield cluster
    finally:
        _end(cluster, daemons)


def _end(cluster: Slurm, daemons: list[subprocess.Popen[bytes]]) -> None:
    if len(daemons) == 3:
        cluster.run("scancel", "--state=PENDING")
        cluster.run("scancel", "--signal=KILL", "--full")
    for daemon in reversed(daemons):
        daemon.terminate()
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
    # Job steps are no children of this process; they are known by the cluster's configuration.
    left = [p for p in psutil.process_iter() if _belongs(p, cluster)]
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=10)


def _belongs(process: psutil.Process, cluster: Slurm) -> bool:
    try:
        return process.environ().get("SLURM_CONF") == cluster.environment["SLURM_CONF"]
    except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [s.getsockname()[1] for s in sockets]
