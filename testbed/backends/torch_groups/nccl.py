"""`nccl`: all-reduces of torch.distributed between GPUs."""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from typing import Any

import torch

from testbed.backends.protocol import Group
from testbed.backends.torch_groups.backend import LIBRARY_TIMEOUT, TorchBackend, dist
from testbed.base.errors import Unavailable, UsageError


def open_nccl(group: Group) -> TorchBackend:
    """NCCL for this rank.

    Raises:
        Unavailable: ranks share a GPU and this NCCL refuses that.
        UsageError: ranks share a GPU and several channels are asked for.
    """
    check_ranks(group)
    return TorchBackend(group, "nccl", "cuda", make_nccl, end_nccl)


def check_ranks(group: Group) -> None:
    """Refuse ranks that share a GPU where NCCL does, or where they would wait for ever.

    Raises:
        Unavailable, UsageError: see `open_nccl`.
    """
    told = group.control.all_gather(
        f"{group.name}.gpus", f"{group.machine} {_gpu_of(group)}".encode(), 60, members=group.size
    )
    sharing = max(Counter(told).values())
    if sharing > 1:
        allowed = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        check_shared(f"{sharing} ranks share a GPU", nccl_version(), allowed)
        if group.num_channels > 1:
            raise UsageError(
                f"{sharing} ranks share a GPU, and backend 'nccl' was asked for "
                f"{group.num_channels} channels; expected one, because a GPU computes for one rank "
                "at a time and operations of two communicators then wait for each other for ever; "
                "use a scheduler with one channel, or a GPU for each rank"
            )


def _gpu_of(group: Group) -> str:
    """Which GPU is this rank's, whatever its number is in this process."""
    found = torch.cuda.get_device_properties(group.device)
    return str(getattr(found, "uuid", group.device))


def check_shared(what: str, version: tuple[int, ...], allowed: bool) -> None:
    """Refuse ranks on one GPU where NCCL does.

    Args:
        what: of the ranks, in words.
        version: of NCCL.
        allowed: it was told to allow that.

    Raises:
        Unavailable: says what to do.

    Example:
        >>> check_shared("2 ranks share 1 GPU(s)", (2, 30, 7), allowed=True)
    """
    reason = f"{what} and NCCL {'.'.join(map(str, version))} refuses that"
    if version < (2, 30):
        raise Unavailable("backend", "nccl", reason, "use NCCL 2.30 or later, or fewer ranks")
    if not allowed:
        remedy = "set NCCL_MULTI_RANK_GPU_ENABLE=1 in the environment of all ranks"
        raise Unavailable("backend", "nccl", f"{reason} unless it is told to", remedy)


def nccl_version() -> tuple[int, ...]:
    """The version of the NCCL that is loaded; torch tells the one that it was built with."""
    try:
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD)
    except OSError:  # it is a part of torch's own library
        return tuple(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    number = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(number))
    major, rest = divmod(number.value, 10_000)
    return major, rest // 100, rest % 100


def probe_nccl() -> tuple[str, str] | None:
    """None if it can run here, else why not and what to do."""
    if not (dist.is_available() and dist.is_nccl_available()):
        return "this torch was built without NCCL", "install a CUDA build of torch"
    if not torch.cuda.is_available():
        return "no CUDA device is visible", "run on a machine with an NVIDIA GPU and driver"
    return None


def make_nccl(group: Group, store: Any) -> Any:
    """NCCL's process group of one channel, on this rank's GPU."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = LIBRARY_TIMEOUT
    made = dist.ProcessGroupNCCL(store, group.rank, group.size, options)
    made.bound_device_id = torch.device(group.device)  # else a barrier guesses one
    return made


def end_nccl(made: Any) -> None:
    """Local: what was exchanged has arrived, or a rank is lost, for which nobody waits."""
    made.abort()
