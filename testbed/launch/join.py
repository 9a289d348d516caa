"""From a launcher's variables to an opened backend: the one place where a process joins a job."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TextIO

import psutil

from testbed.backends.protocol import Backend, Group, Order
from testbed.base.axes import BackendFacts
from testbed.base.config import START_S
from testbed.base.errors import Disagreement, UsageError
from testbed.base.parts import Resolved
from testbed.cluster.facts import find_facts
from testbed.control.inproc import InprocHub
from testbed.control.protocol import Control, gather
from testbed.launch.host import choose_address
from testbed.launch.identity import Identity, identify
from testbed.launch.rendezvous import load_mpi, meet
from testbed.records.environment import version_of


@dataclass(frozen=True)
class Role:
    """What this process is in its job.

    Attributes:
        identity: what the launcher said.
        backend: that was asked for.
        num_workers: processes that train.
        num_servers: dedicated server processes; they are the members after the workers.
    """

    identity: Identity
    backend: Resolved[BackendFacts]
    num_workers: int
    num_servers: int

    @property
    def is_server(self) -> bool:
        """Whether this process serves instead of training."""
        return self.identity.rank >= self.num_workers


def assign_role(
    identity: Identity, backend: Resolved[BackendFacts], num_workers: int | None
) -> Role:
    """Workers first, then dedicated servers, out of what the launcher started.

    Raises:
        UsageError: the launcher's count does not fit; says with how many to start it.
    """
    num_servers = backend.facts.num_servers
    size = identity.size
    if size is None:
        raise UsageError(
            f"{identity.launcher} tells no number of processes; start with mpirun or srun"
        )
    workers = size - num_servers if num_workers is None else num_workers
    if workers < 1 or workers + num_servers != size:
        needed = max(workers, 1)
        raise UsageError(
            f"{identity.launcher} started {size} processes, but the run needs {needed} workers "
            f"and {num_servers} dedicated servers; start {needed + num_servers}"
        )
    if backend.facts.needs_mpi and identity.launcher in ("testbed", "torchrun") and size > 1:
        raise UsageError(
            f"backend {backend.name!r} needs an MPI launcher, and {identity.launcher} started this "
            f"process; use mpirun -n {size} testbed run ..."
        )
    return Role(identity, backend, workers, num_servers)


def left_to_start_s(deadline_s: float) -> float:
    """Seconds of a start deadline that are left: it counts from the start of this process."""
    began_s: float = psutil.Process().create_time()
    return max(1.0, deadline_s - (time.time() - began_s))


def join(
    role: Role,
    *,
    environment: Mapping[str, str] = os.environ,
    interface: str | None = None,
    deadline_s: float = 10.0,
    start_s: float = START_S,
    order: Order = "fifo",
    num_channels: int = 1,
    device: str = "cpu",
    name: str = "backend",
) -> Group:
    """Meet the other members; collective over workers and dedicated servers.

    Raises:
        RankLost, DeadlineExceeded, RunFailed: the others did not come within `start_s`; names them.
        Disagreement: the members were started with different settings.
    """
    identity = role.identity
    size = role.num_workers + role.num_servers
    control: Control
    if size == 1:
        control, token = InprocHub(1).member(0), secrets.token_bytes(16)
    else:
        control, token = meet(
            identity,
            size,
            environment,
            interface=interface,
            deadline_s=deadline_s,
            start_s=start_s,
        )
    mine, kind = (
        (socket.gethostname(), settings_of(role, order), num_channels),
        tuple[str, str, int],
    )
    # Rank 0's hub gives up after start_s and says whom it lacks; that word comes first.
    members = gather(control, "join", mine, kind, start_s + deadline_s, None)
    _agree(members)
    hosts = tuple(host for host, _, _ in members)
    try:
        address = choose_address(interface, single_host=len(set(hosts)) == 1)
    except UsageError as error:  # of this host alone: the others wait for it already
        control.report_failure(f"it failed while joining with UsageError: {error}")
        raise UsageError(f"rank {identity.rank} (host {hosts[identity.rank]}): {error}") from error
    emulated = find_facts(environment)
    return Group(
        rank=identity.rank,
        size=role.num_workers,
        control=control,
        num_servers=role.num_servers,
        host=hosts[identity.rank],
        address=address,
        token=token,
        deadline_s=0.8 * deadline_s,
        order=order,
        num_channels=num_channels,
        device=device,
        hosts=hosts[: role.num_workers],
        server_hosts=hosts[role.num_workers :],
        latency_s=emulated.latency_s if emulated else 0.0,
        jitter_s=emulated.jitter_s if emulated else 0.0,
        name=name,
    )


def settings_of(role: Role, order: Order) -> str:
    """What all ranks must have been started with; records tell of rank 0's versions alone."""
    return (
        f"{role.backend.name} {role.backend.options} workers={role.num_workers} order={order} "
        f"testbed={version_of('testbed')} torch={version_of('torch')}"
    )


def _agree(members: list[tuple[str, str, int]]) -> None:
    for rank, (host, settings, channels) in enumerate(members):
        if (settings, channels) != members[0][1:]:
            raise Disagreement(
                f"rank {rank} (host {host}) was started with {settings} channels={channels}; "
                f"rank 0 with {members[0][1]} channels={members[0][2]}; start all ranks alike"
            )


def open_backend(role: Role, group: Group) -> Backend:
    """Open the backend in the group; collective over the workers."""
    # These need torch, which joining alone does not.
    from testbed.backends.staged import open_delayed, staged

    def open_inner(group: Group) -> Backend:
        opened: Backend = role.backend.build(group)
        return opened

    if role.backend.facts.device_types == frozenset({"cpu"}) and not group.device.startswith("cpu"):
        inner = open_delayed(open_inner, replace(group, device="cpu"))
        return staged(inner, group.device, group.deadline_s)
    return open_delayed(open_inner, group)


def announce_identity(identity: Identity, stream: TextIO = sys.stderr) -> None:
    """Say on rank 0 which launcher was believed, unless `testbed` itself started it."""
    started_here = "TESTBED_STARTED" in os.environ
    if identity.rank == 0 and not started_here and identity.launcher not in ("alone", "testbed"):
        words = " ".join(f"{k}={v}" for k, v in identity.variables.items())
        stream.write(f"testbed: joined by {identity.launcher} ({words})\n")


def complete(identity: Identity) -> Identity:
    """Fill in a size that only MPI knows (a bare PMIx launcher)."""
    if identity.size is not None:
        return identity
    mpi = load_mpi(os.environ)
    world = mpi.COMM_WORLD
    local = world.Split_type(mpi.COMM_TYPE_SHARED)
    filled = Identity(
        identity.launcher, world.rank, world.size, local.rank, local.size, identity.variables
    )
    local.Free()
    return filled


def who_am_i(environment: Mapping[str, str] = os.environ) -> Identity:
    """This process's identity, completed by MPI where the variables lack the size."""
    return complete(identify(environment))
