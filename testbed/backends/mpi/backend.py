"""The opened backend, the same for our ring and for the MPI library's own collectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from testbed.backends.checks import check_parts, tensors_of
from testbed.backends.mpi.backoff import Patience
from testbed.backends.mpi.channel import RingCollectives
from testbed.backends.mpi.dtypes import SUPPORTED
from testbed.backends.mpi.flow import flat_groups, groups_of
from testbed.backends.mpi.library import LibraryCollectives
from testbed.backends.mpi.loop import Collectives, Loop, Steps, Wakeup
from testbed.backends.mpi.options import LibraryOptions, RingOptions
from testbed.backends.mpi.world import Joined, join
from testbed.backends.protocol import Group
from testbed.backends.queue import RequestQueue
from testbed.backends.work import PendingWork
from testbed.base.errors import UsageError
from testbed.base.types import Capabilities, Op, Request, Traffic

OPS = frozenset(Op) - {Op.MERGE, Op.INSTALL, Op.APPLY}


class MpiBackend:
    """Requests go to the loop's thread; see `Backend`.

    Args:
        group: the job.
        joined: its communicators.
        collectives: what runs a request.
        settled: see `Capabilities`.
    """

    def __init__(
        self,
        group: Group,
        joined: Joined,
        collectives: Collectives,
        settled: object | None = None,
    ) -> None:
        self.rank, self.size = group.rank, group.size
        self.capabilities = Capabilities(
            OPS,
            num_channels=group.num_channels,
            # a + b has the same bits in any order; of three and more the algorithm decides
            exact_order=group.size <= 2,
            settled=settled,
        )
        self._deadline_s = group.deadline_s
        self._joined = joined
        self._collectives = collectives
        doorbell = Wakeup()
        self._requests = RequestQueue(group, doorbell.ring)
        self._loop = Loop(
            self._requests,
            collectives.steps,
            group.num_channels,
            Patience(joined.manners),
            doorbell,
            self._farewell,
            _reporter(group),
        )
        self._loop.start()

    def submit(self, request: Request) -> PendingWork:
        """See `Backend.submit`."""
        check_request(request, self.size)
        work = PendingWork(request, self._deadline_s)
        self._requests.submit(work)
        return work

    def traffic(self) -> Traffic:
        """See `Backend.traffic`."""
        return self._loop.traffic

    def close(self, timeout_s: float = 10.0) -> None:
        """See `Backend.close`; collective. After a loss nothing more is said to MPI."""
        self._requests.close()
        self._loop.close(timeout_s)

    def _farewell(self) -> Steps[None]:
        yield self._joined.base.Ibarrier()  # from here on nobody will be waited for in vain
        self._collectives.free()
        self._joined.free()


def check_request(request: Request, size: int) -> None:
    """Refuse what the collectives cannot do.

    Raises:
        UsageError: the op, dtype, device, layout or root does not fit.
    """
    op, tensor = request.op, request.tensor
    if op not in OPS:
        known = ", ".join(sorted(OPS))
        raise UsageError(f"op is {op.value!r}; the MPI backends take {known}")
    check_parts(request, size)
    if op == Op.BARRIER:
        if tensor is not None:
            raise UsageError("a barrier was given a tensor; expected none; use sum or broadcast")
        return
    for given in tensors_of(request):
        _check_tensor(request, given)
    if op == Op.ALL_GATHER and tensor is not None and tensor.dim() != 1:
        raise UsageError(
            f"{request} has shape {tuple(tensor.shape)}; expected one dimension; call .view(-1)"
        )
    if op == Op.BROADCAST and not 0 <= request.root < size:
        raise UsageError(f"{request} has root {request.root}; expected 0 .. {size - 1}")


def _check_tensor(request: Request, tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu":
        raise UsageError(
            f"{request} is on {tensor.device}; expected a CPU tensor; stage it through host memory"
        )
    if tensor.dtype not in SUPPORTED:
        known = ", ".join(str(d).removeprefix("torch.") for d in SUPPORTED)
        raise UsageError(f"{request} has dtype {tensor.dtype}; expected one of {known}")
    if not tensor.is_contiguous():
        raise UsageError(f"{request} is not contiguous; expected contiguous; call .contiguous()")


def _reporter(group: Group) -> Callable[[BaseException], None]:
    def report(error: BaseException) -> None:
        group.control.report_failure(f"{type(error).__name__}: {error}")

    return report


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
        Patience(joined.manners),
    )
    settled = replace(options, switch_bytes=str(collectives.switch_bytes))
    return MpiBackend(group, joined, collectives, settled)


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
    return MpiBackend(group, joined, LibraryCollectives(joined.comms, options.blocking))
