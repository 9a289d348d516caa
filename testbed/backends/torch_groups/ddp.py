"""`peer:ddp`: PyTorch's DistributedDataParallel over Gloo, measured as a row of the same tables.

The model is wrapped in `torch.nn.parallel.DistributedDataParallel`: buckets in the order in which
gradients became ready in the first step, all-reduced as they fill, the first one smaller (Li et
al., 2020, VLDB).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from testbed.backends.protocol import Group
from testbed.backends.torch_groups.backend import TorchBackend, dist
from testbed.backends.torch_groups.gloo import make_gloo, refuse_without_gloo
from testbed.backends.torch_groups.options import PeerOptions
from testbed.base.types import Traffic


class DdpBackend(TorchBackend):
    """See `Backend` and `ExternalFramework`; its ops are Gloo's, on the wrapper's connections.

    Args:
        group: the job.
        options: of the wrapper.

    Raises:
        Unavailable: this torch has no Gloo.
    """

    def __init__(self, group: Group, options: PeerOptions) -> None:
        refuse_without_gloo("peer")
        super().__init__(group, "peer", "cpu", make_gloo)
        self._options = options
        self._wrapped: DistributedDataParallel | None = None
        self._exchanged = Traffic()

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """See `ExternalFramework.wrap`."""
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
        """See `ExternalFramework.hold_back`."""
        assert self._wrapped is not None
        held: AbstractContextManager[None] = self._wrapped.no_sync()
        return held

    def count_step(self) -> None:
        """See `ExternalFramework.count_step`; counted as a ring's traffic, as all of Gloo's is."""
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
