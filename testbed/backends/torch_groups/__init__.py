"""`gloo`, `nccl`: the collectives of torch.distributed; `ddp`: PyTorch's own use of them.

Importing this module does not load torch, which takes seconds; opening a backend does, and so does
asking whether NCCL can run here.

Process groups are made directly, not through torch's default group, so that a user's own use of
torch.distributed in the same process is left alone. The libraries' algorithms are not visible from
Python: traffic is counted as a ring's, 2 (n - 1) / n of the tensor each way, the least that any
all-reduce needs (Patarasuk and Yuan, 2009), and as one message a round; Gloo's halves are a ring of
our own whose pieces and padding are not counted. An all-to-all sends each part once.

Limit of `nccl` on several channels: the order of requests is the same on all ranks within each
channel only, so ranks may launch operations of different communicators in different orders. NCCL
asks for one order across communicators: where operations of one need so much of the GPU that those
of another cannot run beside them, ranks can wait for each other for ever. One channel is safe.
"""

from __future__ import annotations

from dataclasses import dataclass

from testbed.backends.protocol import Backend, Group
from testbed.base.axes import BackendFacts, OwnSchedule
from testbed.base.errors import UsageError
from testbed.base.parts import Part, installed

# What DistributedDataParallel takes where it is given no size of a bucket; a test asks torch.
BUCKET_MIB, FIRST_BUCKET_MIB = 25, 1


@dataclass(frozen=True)
class DdpOptions:
    """Options of `ddp`, which are those of DistributedDataParallel.

    Attributes:
        bucket_mib: size of every bucket (`bucket_cap_mb`) in MiB; None = torch's own: 25, and 1 for
            the first bucket, so that sending begins early.
        bucket_view: gradients are views into the buckets (`gradient_as_bucket_view`), which saves
            their memory once and a copy each way.
    """

    bucket_mib: float | None = None
    bucket_view: bool = False

    def __post_init__(self) -> None:
        if self.bucket_mib is not None and not self.bucket_mib > 0:
            raise UsageError(
                f"ddp: bucket_mib is {self.bucket_mib:g}; expected a size above 0, or none for "
                "torch's own"
            )


def _open_gloo(group: Group, options: object) -> Backend:
    from testbed.backends.torch_groups.backend import open_gloo

    return open_gloo(group)


def _open_nccl(group: Group, options: object) -> Backend:
    from testbed.backends.torch_groups.nccl import open_nccl

    return open_nccl(group)


def _open_ddp(group: Group, options: object) -> Backend:
    from testbed.backends.torch_groups.ddp import DdpBackend

    assert isinstance(options, DdpOptions)
    return DdpBackend(group, options.bucket_mib, options.bucket_view)


def _probe_nccl() -> tuple[str, str] | None:
    from testbed.backends.torch_groups.nccl import probe_nccl

    return probe_nccl()


def _schedule(options: object) -> OwnSchedule:
    """As `bucket`: torch's sizes, or one size for all.

    Example:
        >>> _schedule(DdpOptions()).like, _schedule(DdpOptions(bucket_mib=10)).like
        ('bucket:mib=25,first_mib=1', 'bucket:mib=10,first_mib=10')
    """
    assert isinstance(options, DdpOptions)
    size, first = options.bucket_mib or BUCKET_MIB, options.bucket_mib or FIRST_BUCKET_MIB
    return OwnSchedule("ddp", f"bucket:mib={size:g},first_mib={first:g}")


_PROBE_GLOO = installed("torch", "pip install torch")

GLOO = Part(
    name="gloo",
    summary="torch.distributed's Gloo all-reduce over TCP",
    build=_open_gloo,
    facts=lambda options: BackendFacts(algorithm="ring"),
    probe=_PROBE_GLOO,
)

NCCL = Part(
    name="nccl",
    summary="torch.distributed's NCCL all-reduce between GPUs",
    build=_open_nccl,
    facts=lambda options: BackendFacts(algorithm="ring", device_types=frozenset({"cuda"})),
    probe=_probe_nccl,
)

DDP = Part(
    name="ddp",
    summary="PyTorch's DistributedDataParallel over Gloo, as it comes",
    build=_open_ddp,
    options=DdpOptions,
    facts=lambda options: BackendFacts(algorithm="ring", schedule=_schedule(options)),
    probe=_PROBE_GLOO,
)
