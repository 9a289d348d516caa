"""The opened backend, the same for our ring and for the MPI library's own collectives."""

from __future__ import annotations

from dataclasses import replace

from testbed.backends.checks import check_request
from testbed.backends.mpi.backoff import Backoff
from testbed.backends.mpi.channel import RingCollectives
from testbed.backends.mpi.flow import flat_groups, groups_of
from testbed.backends.mpi.library import LibraryCollectives
from testbed.backends.mpi.loop import Collectives, Loop, Steps, Wakeup
from testbed.backends.mpi.options import LibraryOptions, RingOptions
from testbed.backends.mpi.world import Joined, join
from testbed.backends.protocol import Group
from testbed.backends.queue import PendingWork, RequestQueue
from testbed.base.errors import UsageError
from testbed.base.types import SERVERLESS_OPS, Capabilities, Request, Traffic


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
        """See `Backend.close`; collective. After a loss nothing more is said to MPI."""
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
