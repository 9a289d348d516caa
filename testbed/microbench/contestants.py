"""Who takes part: the backends of one job, and what the job must be for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from testbed.backends.protocol import Backend, Group
from testbed.base.axes import BACKENDS, BackendFacts
from testbed.base.errors import UsageError
from testbed.base.parts import Part, Resolved
from testbed.microbench.bandwidth import bus_factor
from testbed.microbench.config import OPS
from testbed.records.comm import CommConfig

Contestant = Resolved[BackendFacts]
"""One backend of the job; its row is called by its specification."""


def bus_factor_of(contestant: Contestant, config: CommConfig) -> float:
    """What a backend's busbw is of its algbw.

    Raises:
        UsageError: its options do not fit the number of workers.
    """
    of_sum = contestant.facts.bus_factor(config.workers)
    return bus_factor(config.op, config.workers, of_sum)


def comparable() -> tuple[str, ...]:
    """The backends that add up between processes on CPUs.

    Example:
        >>> [name for name in comparable() if name in BACKENDS.builtin]
        ['mpi-ring', 'mpi', 'gloo', 'zmq-ps']
    """
    return BACKENDS.which(
        lambda facts: (
            facts.exchanges
            and not facts.in_process
            and facts.schedule is None
            and "cpu" in facts.device_types
        )
    )


def resolve(labels: Sequence[str]) -> tuple[Contestant, ...]:
    """All backends, checked before any process is started.

    Raises:
        UnknownName, UsageError: a name or option is wrong, or the backend moves nothing between
            processes.
        Unavailable: one cannot run here; names it.
    """
    found = []
    for label in labels:
        backend = BACKENDS.resolve(label).usable()
        if backend.facts.in_process:
            raise UsageError(
                f"backend {label!r} joins threads of one process; `testbed comm` measures between "
                "processes; choose another, see testbed list"
            )
        if not backend.facts.exchanges:
            raise UsageError(
                f"backend {label!r} moves nothing: there is no bandwidth to measure; leave it out"
            )
        found.append(backend)
    return tuple(found)


def together(contestants: Sequence[Contestant]) -> Contestant:
    """The whole job as one backend: an MPI launcher if any needs one, and the most servers.

    Dedicated servers serve every backend that asks for them: the first S server processes serve a
    backend with S of them, each backend in a thread of its own.
    """
    facts = BackendFacts(
        needs_mpi=any(c.facts.needs_mpi for c in contestants),
        num_servers=max(c.facts.num_servers for c in contestants),
    )
    name = ",".join(c.text for c in contestants)
    part = Part(name, "several backends in one job", _refuse, facts=lambda options: facts)
    return BACKENDS.join(part, part.options(), name)


def _refuse(group: Group, options: object) -> Backend:
    raise UsageError("a job of several backends opens each in its own group")


def own_group(group: Group, contestants: Sequence[Contestant], number: int) -> Group:
    """The job as one of its backends sees it."""
    return replace(group, name=f"comm{number}", num_servers=contestants[number].facts.num_servers)


def check_opened(config: CommConfig, backend: Backend, label: str, device: str) -> None:
    """Refuse what an opened backend does not declare, before anything is timed.

    Raises:
        UsageError: operation or device; says what the backend takes.
    """
    lacking = [op for op in OPS[config.op] if op not in backend.capabilities.ops]
    if lacking:
        known = ", ".join(sorted(backend.capabilities.ops))
        raise UsageError(f"backend {label!r} cannot {', '.join(lacking)}; it can {known}")
    device_type = device.partition(":")[0]
    if device_type not in backend.capabilities.device_types:
        words = ", ".join(sorted(backend.capabilities.device_types))
        raise UsageError(
            f"--device is {config.device} but backend {label!r} takes tensors on {words}; measure "
            "backends of one device at a time"
        )
