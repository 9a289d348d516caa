"""`peer:NAME`: another framework's own gradient exchange, measured as a row of the same tables.

`peer:ddp` wraps the model in `torch.nn.parallel.DistributedDataParallel` over Gloo: buckets in the
order in which gradients became ready in the first step, all-reduced as they fill, the first one
smaller (Li et al., 2020, VLDB).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.nn.parallel import DistributedDataParallel

from testbed.backends.protocol import BackendKind, Group, OwnSchedule
from testbed.backends.torch_groups import GLOO, TorchBackend, dist, make_gloo
from testbed.errors import UsageError
from testbed.nouns import Traffic
from testbed.spec import BARE_OPTION

FIRST_BUCKET_MIB = 1  # torch.distributed's own default, which is no option of the wrapper


@dataclass(frozen=True)
class PeerOptions:
    """Options of `peer`.

    Attributes:
        framework: whose exchange is measured.
        bucket_mib: size of a bucket, the framework's `bucket_cap_mb`.
    """

    framework: Literal["ddp"] = field(default="ddp", metadata=BARE_OPTION)
    bucket_mib: float = 25.0

    def __post_init__(self) -> None:
        if not self.bucket_mib > 0:
            raise UsageError(f"peer: bucket_mib is {self.bucket_mib:g}; expected a size above 0")


class DdpBackend(TorchBackend):
    """See `Backend` and `Peer`; its verbs are Gloo's, on the connections that the wrapper uses.

    Args:
        group: the job.
        options: of the wrapper.
    """

    def __init__(self, group: Group, options: PeerOptions) -> None:
        super().__init__(group, "peer", "cpu", make_gloo)
        self._options = options
        self._wrapped: DistributedDataParallel | None = None
        self._exchanged = Traffic()

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """See `Peer.wrap`."""
        gloo = dist.ProcessGroup.BackendType.GLOO
        process_group = dist.ProcessGroup(self._store, self.rank, self.size)
        process_group._register_backend(torch.device("cpu"), gloo, self._groups[0])
        process_group._set_default_backend(gloo)
        wrapper: Any = DistributedDataParallel
        self._wrapped = wrapper(
            model, process_group=process_group, bucket_cap_mb=self._options.bucket_mib
        )
        return self._wrapped

    def hold_back(self) -> AbstractContextManager[None]:
        """See `Peer.hold_back`."""
        assert self._wrapped is not None
        held: AbstractContextManager[None] = self._wrapped.no_sync()
        return held

    def count_step(self) -> None:
        """See `Peer.count_step`; counted as a ring's traffic, as all of Gloo's is."""
        assert self._wrapped is not None
        sizes = [p.numel() * p.element_size() for p in self._wrapped.parameters()]
        moved = 2 * (self.size - 1) * sum(sizes) // self.size
        self._exchanged += Traffic(moved, moved)

    def traffic(self) -> Traffic:
        """See `Backend.traffic`."""
        return super().traffic() + self._exchanged

    def close(self, timeout_s: float = 10.0) -> None:
        """See `Backend.close`."""
        self._wrapped = None
        super().close(timeout_s)


def _open(group: Group, options: object) -> DdpBackend:
    assert isinstance(options, PeerOptions)
    return DdpBackend(group, options)


def _schedule(options: object) -> OwnSchedule:
    assert isinstance(options, PeerOptions)
    like = f"bucket:mib={options.bucket_mib:g},first_mib={FIRST_BUCKET_MIB}"
    return OwnSchedule(options.framework, like)


PEER = BackendKind(
    name="peer",
    summary="peer:ddp - PyTorch's DistributedDataParallel over Gloo, as it comes",
    open=_open,
    options=PeerOptions,
    probe=GLOO.probe,
    schedule=_schedule,
)
