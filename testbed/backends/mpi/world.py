"""How a rank finds its group among the processes that the MPI launcher started."""

from __future__ import annotations

import os
from dataclasses import dataclass

import msgspec
from mpi4py import MPI

from testbed.backends.machine import machine_id
from testbed.backends.mpi.backoff import BackoffPolicy, backoff_for
from testbed.backends.protocol import Group
from testbed.base.errors import Unavailable, UsageError


class RankInfo(msgspec.Struct, frozen=True):
    """Where one rank runs: its rank in MPI's world, its host and the cores that it may use.

    Hosts that are containers or network namespaces of one machine share its cores, so `machine`
    may be the same for several of them.
    """

    world_rank: int
    host: str
    machine: str
    cores: tuple[int, ...]


@dataclass(frozen=True)
class Joined:
    """A rank's ends of the group's communicators.

    Attributes:
        base: all ranks of the group, for the barrier before its communicators are freed.
        comms: one communicator per channel.
        backoff: how to wait on this host.
        hosts: host of every rank.
    """

    base: MPI.Intracomm
    comms: tuple[MPI.Intracomm, ...]
    backoff: BackoffPolicy
    hosts: tuple[str, ...]

    def free(self) -> None:
        """Give the communicators back; collective, and nothing may be in flight."""
        for comm in (*self.comms, self.base):
            comm.Free()


def join(group: Group) -> Joined:
    """Make the group's communicators; collective over all of its ranks.

    Raises:
        Unavailable: the MPI library does not allow a second thread to call it.
        UsageError: MPI is finalized, or the ranks were not started by one MPI launcher.
        RankLost, DeadlineExceeded: a rank did not come.
    """
    _require_threads()
    cores = tuple(sorted(os.sched_getaffinity(0)))
    host = group.hosts[group.rank] if group.hosts else group.host
    mine = RankInfo(MPI.COMM_WORLD.Get_rank(), host, machine_id(host), cores)
    told = group.control.all_gather(
        f"{group.name}.mpi", msgspec.msgpack.encode(mine), group.deadline_s, members=group.size
    )
    ranks = [msgspec.msgpack.decode(text, type=RankInfo) for text in told]
    world_ranks = [rank.world_rank for rank in ranks]
    if len(set(world_ranks)) < len(world_ranks):
        raise UsageError(
            f"the {group.size} ranks of the group have the MPI ranks {world_ranks}; expected all "
            "different; start them with one launcher: mpirun -n N python -m ..."
        )
    members = MPI.COMM_WORLD.Get_group().Incl(world_ranks)
    base = MPI.COMM_WORLD.Create_group(members)
    members.Free()
    comms = tuple(base.Dup() for _ in range(group.num_channels))
    policy = backoff_on(mine.machine, ranks)
    return Joined(base, comms, policy, tuple(rank.host for rank in ranks))


def backoff_on(machine: str, ranks: list[RankInfo]) -> BackoffPolicy:
    """How the ranks of one machine wait, from how many share how many cores."""
    here = [rank for rank in ranks if rank.machine == machine]
    return backoff_for(len(here), len({core for rank in here for core in rank.cores}))


def _require_threads() -> None:
    if MPI.Is_finalized():
        raise UsageError("MPI is already finalized; open the backend before MPI_Finalize")
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise Unavailable(
            "backend",
            "mpi",
            "MPI was initialised for one thread only, but a backend calls it from its own thread",
            'initialise it with mpi4py.rc.thread_level = "multiple" (the default of mpi4py)',
        )
