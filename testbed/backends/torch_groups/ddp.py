"""`ddp`: PyTorch's DistributedDataParallel over Gloo, measured as a row of the same tables."""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from testbed.backends.protocol import Group
from testbed.backends.torch_groups.backend import (
    TorchBackend,
    dist,
    make_gloo,
    refuse_without_gloo,
)
from testbed.base.types import Traffic


class DdpBackend(TorchBackend):
    """See `Backend` and `ExternalFramework`; its ops are Gloo's, beside the wrapper's connections.

    The model is wrapped in `torch.nn.parallel.DistributedDataParallel` as it comes: buckets in the
    order in which gradients became ready in the first step, all-reduced as they fill.

    Args:
        group: the job.
        bucket_mib: size of every bucket; None = torch's own sizes.
        bucket_view: gradients are views into the buckets.

    Raises:
        Unavailable: this torch has no Gloo.

    Reference:
        Li et al., 2020, VLDB (PyTorch Distributed).
    """

    def __init__(self, group: Group, bucket_mib: float | None, bucket_view: bool) -> None:
        refuse_without_gloo("ddp")
        super().__init__(group, "ddp", "cpu", make_gloo)
        self._group = group
        self._bucket_mib, self._bucket_view = bucket_mib, bucket_view
        self._wrapped: DistributedDataParallel | None = None
        self._gloo: Any = None
        self._exchanged = Traffic()

    def wrap(self, model: torch.nn.Module, timeout_s: float) -> torch.nn.Module:
        """See `ExternalFramework.wrap`."""
        # Connections of its own, with a timeout of their own; requests have the deadline of `wait`.
        self._gloo = make_gloo(
            self._group, dist.PrefixStore(f"{self._group.name}/ddp", self._store)
        )
        self.set_timeout(timeout_s)
        kind = dist.ProcessGroup.BackendType.GLOO
        process_group = dist.ProcessGroup(self._store, self.rank, self.size)
        process_group._register_backend(torch.device("cpu"), kind, self._gloo)
        process_group._set_default_backend(kind)
        wrapper: Any = DistributedDataParallel
        # Any number here, even its default of 25, would be the first bucket's size too.
        self._wrapped = wrapper(
            model,
            process_group=process_group,
            bucket_cap_mb=self._bucket_mib,
            gradient_as_bucket_view=self._bucket_view,
        )
        return self._wrapped

    def hold_back(self) -> AbstractContextManager[None]:
        """See `ExternalFramework.hold_back`."""
        assert self._wrapped is not None
        held: AbstractContextManager[None] = self._wrapped.no_sync()
        return held

    def set_timeout(self, timeout_s: float) -> None:
        """See `ExternalFramework.set_timeout`."""
        self._gloo._set_default_timeout(timedelta(seconds=timeout_s))

    def broke(self, error: BaseException) -> bool:
        """See `ExternalFramework.broke`; Gloo's errors name the line of its source."""
        return isinstance(error, RuntimeError) and "/gloo/" in str(error)

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
        self._wrapped = self._gloo = None
        super().close(timeout_s)
