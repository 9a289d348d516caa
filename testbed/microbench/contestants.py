"""Who takes part: the backends of one job, and what the job must be for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from testbed.backends.protocol import Backend, BackendKind, Group
from testbed.backends.zmq_ps.options import ZmqPsOptions
from testbed.backends.zmq_ps.placement import busiest_link_bytes
from testbed.base.errors import UsageError
from testbed.launch.join import resolve_backend
from testbed.microbench.bandwidth import bus_factor
from testbed.microbench.config import OPS
from testbed.records.comm import CommConfig


@dataclass(frozen=True)
class Contestant:
    """One backend of the job.

    Attributes:
        label: its specification, as given.
        kind: its registry entry.
        options: its checked options.
    """

    label: str
    kind: BackendKind
    options: Any

    @property
    def num_servers(self) -> int:
        """Dedicated server processes that it asks for."""
        return self.kind.num_servers(self.options)

    def bus_factor(self, config: CommConfig) -> float:
        """What its busbw is of its algbw.

        Raises:
            UsageError: its options do not fit the number of workers.
        """
        if isinstance(self.options, ZmqPsOptions):
            of_sum = busiest_link_bytes(1.0, config.workers, self.options)
        else:
            of_sum = self.kind.bus_factor(config.workers)
        return bus_factor(config.op, config.workers, of_sum)


def resolve(labels: Sequence[str]) -> tuple[Contestant, ...]:
    """All backends, checked before any process is started.

    Raises:
        UnknownName, UsageError: a name or option is wrong, or the backend moves nothing between
            processes.
        Unavailable: one cannot run here; names it.
    """
    found = []
    for label in labels:
        kind, options = resolve_backend(label)
        if kind.in_process:
            raise UsageError(
                f"backend {label!r} joins threads of one process; `testbed comm` measures between "
                "processes; choose another, see testbed list"
            )
        if kind.consistency(options) == "none":
            raise UsageError(
                f"backend {label!r} moves nothing: there is no bandwidth to measure; leave it out"
            )
        found.append(Contestant(label, kind, options))
    return tuple(found)


def together(contestants: Sequence[Contestant]) -> BackendKind:
    """The kind of the whole job: an MPI launcher if any backend needs one, and the most servers.

    Dedicated servers serve every backend that asks for them: the first S server processes serve a
    backend with S of them, each backend in a thread of its own.
    """
    most = max(c.num_servers for c in contestants)
    return BackendKind(
        name=",".join(c.label for c in contestants),
        summary="several backends in one job",
        open=_refuse,
        options=CommConfig,
        needs_mpi=any(c.kind.needs_mpi for c in contestants),
        num_servers=lambda options: most,
    )


def _refuse(group: Group, options: object) -> Backend:
    raise UsageError("a job of several backends opens each in its own group")


def own_group(group: Group, contestants: Sequence[Contestant], number: int) -> Group:
    """The job as one of its backends sees it."""
    return replace(group, name=f"comm{number}", num_servers=contestants[number].num_servers)


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
