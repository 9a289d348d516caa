"""Who am I: the launcher's environment variables to a rank, read at the edge and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from testbed.base.errors import UsageError
from testbed.launch import slurm

Launcher = Literal["testbed", "torchrun", "openmpi", "pmix", "pmi", "slurm", "alone"]


@dataclass(frozen=True)
class Identity:
    """One process of a job, as its launcher described it.

    Attributes:
        launcher: whose variables were believed.
        rank: 0 .. size - 1.
        size: number of processes that the launcher started; None = only MPI itself knows (PMIx).
        local_rank: number among the processes of this host.
        local_size: processes of this host.
        variables: the variables that were believed, for the record.
    """

    launcher: Launcher
    rank: int
    size: int | None
    local_rank: int
    local_size: int
    variables: Mapping[str, str]


@dataclass(frozen=True)
class _Dialect:
    launcher: Launcher
    sign: str  # the variable whose presence means: this launcher started me
    rank: str
    size: str | None
    local_rank: str | None
    local_size: str | None
    begins: str = ""  # how its value begins


# The launcher nearest to the process wins: torchrun may run inside Slurm, mpirun inside Slurm, and
# a batch shell carries Slurm's variables without being a task (it lacks SLURM_STEP_ID).
_DIALECTS = (
    _Dialect(
        "testbed",
        "TESTBED_RANK",
        "TESTBED_RANK",
        "TESTBED_SIZE",
        "TESTBED_LOCAL_RANK",
        "TESTBED_LOCAL_SIZE",
    ),
    _Dialect(
        "torchrun", "TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    ),
    _Dialect(
        "openmpi",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Dialect("pmi", "PMI_RANK", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Dialect(
        "pmix", "PMIX_NAMESPACE", "PMIX_RANK", "SLURM_NTASKS", "SLURM_LOCALID", None, "slurm."
    ),
    _Dialect("pmix", "PMIX_RANK", "PMIX_RANK", None, None, None),
    _Dialect("slurm", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", None),
)


def identify(environment: Mapping[str, str]) -> Identity:
    """The identity that the environment describes; `alone` when no launcher is in sight.

    Raises:
        UsageError: a launcher's variables are incomplete or no numbers; names them.

    Example:
        >>> identify({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}).launcher
        'openmpi'
    """
    for dialect in _DIALECTS:
        if dialect.sign in environment and environment[dialect.sign].startswith(dialect.begins):
            found = _read(dialect, environment)
            # A step of one task is somebody's interactive shell, not a job of its own.
            if found.launcher == "slurm" and (found.size == 1 or slurm.is_own_step(environment)):
                return Identity("alone", 0, 1, 0, 1, {})
            return found
    return Identity("alone", 0, 1, 0, 1, {})


def _read(dialect: _Dialect, environment: Mapping[str, str]) -> Identity:
    needed = [name for name in (dialect.rank, dialect.size) if name is not None]
    absent = [name for name in needed if name not in environment]
    if absent:
        raise UsageError(
            f"{dialect.sign} is set, so {dialect.launcher} seems to have started this process, but "
            f"{', '.join(absent)} is not; set it, or unset {dialect.sign} to run alone"
        )

    def number(name: str | None, default: int) -> int:
        text = environment.get(name, str(default)) if name else str(default)
        if not text.isdigit():
            raise UsageError(
                f"{name} is {text!r}; expected a number, as {dialect.launcher} sets it"
            )
        return int(text)

    rank = number(dialect.rank, 0)
    size = number(dialect.size, 1) if dialect.size else None
    if size is not None and not rank < size:
        raise UsageError(f"{dialect.rank} is {rank} but {dialect.size} is {size}; expected less")
    seen = {
        name: environment[name]
        for name in (dialect.rank, dialect.size, dialect.local_rank, dialect.local_size)
        if name is not None and name in environment
    }
    local_rank = number(dialect.local_rank, rank)
    local_size = number(dialect.local_size, size or 1)
    if dialect.local_rank == "SLURM_LOCALID":
        node, counts = number("SLURM_NODEID", 0), slurm.tasks_per_node(environment)
        local_size = counts[node] if node < len(counts) else local_size
    return Identity(dialect.launcher, rank, size, local_rank, local_size, seen)
