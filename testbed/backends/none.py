"""No communication at all: the upper bound of the speed of all other backends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from testbed.backends.protocol import Group
from testbed.backends.queue import PendingWork
from testbed.base.axes import BackendFacts
from testbed.base.parts import NoOptions, Part
from testbed.base.types import SERVERLESS_OPS, Capabilities, Op, Request, Result, Traffic

if TYPE_CHECKING:
    import torch


class NoBackend:
    """Leaves every tensor as it is; with several workers the models drift apart, by design.

    An all-gather brings what this rank gave, once for each rank (so that decoding costs what it
    would); an all-to-all brings the own part and nothing from others.
    """

    def __init__(self, group: Group) -> None:
        from testbed.backends.checks import check_request

        self._check = check_request
        self.rank = group.rank
        self.size = group.size
        self.capabilities = Capabilities(
            SERVERLESS_OPS,
            num_channels=group.num_channels,
            consistency="none",
            device_types=frozenset({"cpu", "cuda"}),
        )

    def submit(self, request: Request) -> PendingWork:
        """Done at once."""
        self._check("none", request, self.capabilities, self.size)
        work = PendingWork(request, 0.0)
        work.finish(Result(request.tensor, self._parts(request)))
        return work

    def _parts(self, request: Request) -> tuple[torch.Tensor, ...]:
        if request.op is Op.ALL_GATHER and request.tensor is not None:
            return (request.tensor,) * self.size
        return tuple(
            part if rank == self.rank else part[:0] for rank, part in enumerate(request.parts)
        )

    def traffic(self) -> Traffic:
        """Nothing ever moved."""
        return Traffic()

    def close(self, timeout_s: float = 10.0) -> None:
        """Nothing to end."""


def open_none(group: Group, options: NoOptions) -> NoBackend:
    """`none`: no op moves anything, so that a step takes what compute alone takes.

        all-reduce: every rank keeps its own x_r;  T(M) = 0 s for any M bytes

    Efficiency in tables is the step time (s) of this backend over that of another. Workers drift
    apart, so that their work is never the same as that of a backend which exchanges.

    Args:
        group: the job.
        options: none.

    Raises:
        UsageError: an option is given; there are none.

    Example:
        >>> import torch
        >>> from testbed.control.inproc import InprocHub
        >>> backend = open_none(Group(0, 2, InprocHub(2).member(0)), NoOptions())
        >>> backend.submit(Request(Op.ALL_REDUCE, torch.ones(2))).wait().tensor
        tensor([1., 1.])
        >>> backend.traffic().sent_bytes
        0

    Reference:
        Linear scaling, the usual upper bound, as Zhang et al., 2017, USENIX ATC (Poseidon) draw it.
        Departs: it is measured with all workers at work on the same machines, not computed from a
        run of one.
    """
    return NoBackend(group)


NONE = Part(
    name="none",
    summary="no communication: the upper bound of the speed (workers drift apart)",
    build=open_none,
    facts=lambda options: BackendFacts(
        consistency="none",
        device_types=frozenset({"cpu", "cuda"}),
        bus_factor=lambda num_workers: 0.0,
    ),
)
