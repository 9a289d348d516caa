"""`gloo`: all-reduces of torch.distributed over TCP, for tensors in main memory."""

from __future__ import annotations

from typing import Any

from testbed.backends.protocol import Group
from testbed.backends.torch_groups.backend import LIBRARY_TIMEOUT, TorchBackend, dist
from testbed.base.errors import Unavailable


def open_gloo(group: Group) -> TorchBackend:
    """Gloo for this rank.

    Raises:
        Unavailable: this torch has no Gloo.
    """
    refuse_without_gloo("gloo")
    return TorchBackend(group, "gloo", "cpu", make_gloo)


def refuse_without_gloo(backend: str) -> None:
    """Torch may have been built without; only loading it tells."""
    if not (dist.is_available() and dist.is_gloo_available()):
        reason = "this torch was built without Gloo"
        raise Unavailable("backend", backend, reason, "install a torch wheel from PyPI")


def make_gloo(group: Group, store: Any) -> Any:
    """Gloo's process group of one channel, bound to the job's own interface."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=group.address)]
    options._timeout = LIBRARY_TIMEOUT
    options._threads = 2
    return dist.ProcessGroupGloo(store, group.rank, group.size, options)
