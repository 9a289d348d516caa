"""`gloo`, `nccl`: the collectives of torch.distributed; `peer:ddp`: PyTorch's own use of them.

Importing this module does not load torch, which takes seconds; opening a backend does, and so does
asking whether NCCL can run here.

Process groups are made directly, not through torch's default group, so that a user's own use of
torch.distributed in the same process is left alone. The libraries' algorithms are not visible from
Python: traffic is counted as a ring's, 2 (n - 1) / n of the tensor each way, the least that any
all-reduce needs (Patarasuk and Yuan, 2009), and as one message a round; Gloo's halves are a ring
(`ring_halves`) whose pieces and padding are not counted. A deliver is an all-to-all, which sends
each part once.

Limit of `nccl` on several channels: the order of requests is the same on all ranks within each
channel only, so ranks may launch operations of different communicators in different orders. NCCL
asks for one order across communicators: where operations of one need so much of the GPU that those
of another cannot run beside them, ranks can wait for each other for ever. One channel is safe.
"""

from __future__ import annotations

import importlib.util

from testbed.backends.protocol import Backend, BackendKind, Group, OwnSchedule
from testbed.backends.torch_groups.options import PeerOptions, TorchOptions

FIRST_BUCKET_MIB = 1  # torch.distributed's own default, which is no option of the wrapper


def _open_gloo(group: Group, options: object) -> Backend:
    from testbed.backends.torch_groups.gloo import open_gloo

    return open_gloo(group)


def _open_nccl(group: Group, options: object) -> Backend:
    from testbed.backends.torch_groups.nccl import open_nccl

    return open_nccl(group)


def _open_peer(group: Group, options: object) -> Backend:
    from testbed.backends.torch_groups.ddp import DdpBackend

    assert isinstance(options, PeerOptions)
    return DdpBackend(group, options)


def _probe_gloo() -> tuple[str, str] | None:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed", "pip install torch"
    return None


def _probe_nccl() -> tuple[str, str] | None:
    from testbed.backends.torch_groups.nccl import probe_nccl

    return probe_nccl()


def _schedule(options: object) -> OwnSchedule:
    assert isinstance(options, PeerOptions)
    like = f"bucket:mib={options.bucket_mib:g},first_mib={FIRST_BUCKET_MIB}"
    return OwnSchedule(options.framework, like)


GLOO = BackendKind(
    name="gloo",
    summary="torch.distributed's Gloo all-reduce over TCP",
    open=_open_gloo,
    options=TorchOptions,
    probe=_probe_gloo,
)

NCCL = BackendKind(
    name="nccl",
    summary="torch.distributed's NCCL all-reduce between GPUs",
    open=_open_nccl,
    options=TorchOptions,
    device_types=frozenset({"cuda"}),
    probe=_probe_nccl,
)

PEER = BackendKind(
    name="peer",
    summary="peer:ddp - PyTorch's DistributedDataParallel over Gloo, as it comes",
    open=_open_peer,
    options=PeerOptions,
    probe=_probe_gloo,
    schedule=_schedule,
)
