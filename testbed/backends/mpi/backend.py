"""The opened backend, the same for our ring and for the MPI library's own collectives."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import msgspec
from mpi4py import MPI

from testbed.backends.checks import check_request
from testbed.backends.mpi.backoff import Backoff, BackoffPolicy, backoff_for
from testbed.backends.mpi.channel import RingCollectives
from testbed.backends.mpi.flow import flat_groups, groups_of
from testbed.backends.mpi.library import LibraryCollectives
from testbed.backends.mpi.loop import Collectives, Loop, Steps, Wakeup
from testbed.backends.mpi.options import LibraryOptions, RingOptions
from testbed.backends.protocol import Group
from testbed.backends.queue import PendingWork, RequestQueue
from testbed.base.errors import Unavailable, UsageError
from testbed.base.types import SERVERLESS_OPS, Capabilities, Request, Traffic
from testbed.control.protocol import OPEN_S, gather

# How a rank finds its group among the processes that the MPI launcher started.


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
    mine = RankInfo(MPI.COMM_WORLD.Get_rank(), group.own_host, group.machine, cores)
    name = f"{group.name}.mpi"
    ranks = gather(group.control, name, mine, RankInfo, OPEN_S, group.size)
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


class MpiBackend:
    """Requests go to the loop's thread; see `Backend`.

    Args:
        group: the job.
        name: the backend's, for messages.
        joined: its communicators.
        collectives: what runs a request.
        settled: see `Capabilities`.
    """

    def __init__(
        self,
        group: Group,
        name: str,
        joined: Joined,
        collectives: Collectives,
        settled: object | None = None,
    ) -> None:
        self.rank, self.size = group.rank, group.size
        self.capabilities = Capabilities(
            SERVERLESS_OPS,
            num_channels=group.num_channels,
            # a + b has the same bits in any order; of three and more the algorithm decides
            exact_order=group.size <= 2,
            settled=settled,
        )
        self._name = name
        self._joined = joined
        self._collectives = collectives
        wakeup = Wakeup()
        self._requests = RequestQueue(group, wakeup.notify)
        self._loop = Loop(
            self._requests,
            wakeup,
            collectives.steps,
            group.num_channels,
            Backoff(joined.backoff),
            self._finalize,
            lambda error: group.control.report_failure(f"{type(error).__name__}: {error}"),
        )
        self._loop.start()

    def submit(self, request: Request) -> PendingWork:
        """See `Backend.submit`."""
        check_request(self._name, request, self.capabilities, self.size)
        return self._requests.submit(request)

    def traffic(self) -> Traffic:
        """See `Backend.traffic`."""
        return self._loop.traffic

    def close(self, timeout_s: float = 10.0) -> None:
        """See `Backend.close`; collective. After a loss MPI is not called again."""
        self._requests.close()
        self._loop.close(timeout_s)

    def _finalize(self) -> Steps[None]:
        yield self._joined.base.Ibarrier()  # from here on no rank waits for another
        self._collectives.free()
        self._joined.free()


# Opens the two backends; imported only when one of them is opened, because it loads MPI.


def open_ring(group: Group, options: RingOptions) -> MpiBackend:
    """Join the group and open `mpi-ring`; collective.

    Raises:
        UsageError: `levels=2` over hosts with different numbers of ranks.
    """
    joined = join(group)
    groups = (
        flat_groups(group.size)
        if options.levels == 1
        else groups_of(joined.hosts, options.group_size)
    )
    collectives = RingCollectives(
        joined.comms,
        options.segment_bytes,
        groups,
        options.fixed_switch_bytes,
        Backoff(joined.backoff),
    )
    settled = options
    if options.fixed_switch_bytes is None:
        settled = replace(options, switch_bytes=str(collectives.switch_bytes))
    return MpiBackend(group, "mpi-ring", joined, collectives, settled)


def open_library(group: Group, options: LibraryOptions) -> MpiBackend:
    """Join the group and open `mpi`; collective.

    Raises:
        UsageError: blocking calls on several channels, which would wait for each other.
    """
    if options.blocking and group.num_channels > 1:
        raise UsageError(
            f"blocking=1 was given with {group.num_channels} channels; expected one, because the "
            "ranks may block on different channels for ever; use channels=1 or blocking=0"
        )
    joined = join(group)
    return MpiBackend(group, "mpi", joined, LibraryCollectives(joined.comms, options.blocking))
