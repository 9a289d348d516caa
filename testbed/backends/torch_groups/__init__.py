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
    """`ddp`: PyTorch's DistributedDataParallel over Gloo, in place of a plan and its exchange.

        for bucket k in the order of the backward pass: when its last gradient is ready, all-reduce

    Each bucket of M bytes is predicted as a ring's all-reduce over n ranks, T(M) = 2 (n - 1) (alpha
    + beta M / n) with alpha in s and beta in s/byte, the buckets as those of the scheduler `bucket`
    with the same sizes.

    Attributes:
        bucket_mib: size of every bucket (`bucket_cap_mb`) in MiB; None = torch's own: 25, and 1 for
            the first bucket, so that sending begins early.
        bucket_view: gradients are views into the buckets (`gradient_as_bucket_view`), which saves
            their memory once and a copy each way.

    Raises:
        UsageError: a size that is not above 0; a scheduler or a compressor is given, too.
        Unavailable: torch is not installed, or was built without Gloo.
        RankLost, DeadlineExceeded: in a step: a rank was lost, or is late.

    Example:
        >>> _schedule(DdpOptions()).like, _schedule(DdpOptions(bucket_mib=10)).like
        ('bucket:mib=25,first_mib=1', 'bucket:mib=10,first_mib=10')

    Reference:
        Li et al., 2020, VLDB (PyTorch Distributed). Departs: only by process groups of its own, so
        that the user's default group is left alone.
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
    """`gloo`: the collectives of torch.distributed over TCP, by Gloo.

        all-reduce:  T(M) = 2 (n - 1) (alpha + beta M / n)
        fold, spread (a ring of our own):  half of that each

    n ranks, M bytes; alpha: seconds of one start-up; beta: seconds per byte of a link in one
    direction. What Gloo does inside cannot be seen from Python and is taken for a ring.

    Args:
        group: the job; one process group is made for each channel.
        options: none.

    Raises:
        UsageError: an option is given; there are none.
        Unavailable: torch is not installed, or was built without Gloo.
        RankLost, DeadlineExceeded: of a request: a rank was lost, or is late.

    Example:
        >>> import torch
        >>> from testbed.base.types import Op, Request
        >>> from testbed.control.inproc import InprocHub
        >>> backend = _open_gloo(Group(0, 1, InprocHub(1).member(0)), None)  # one rank alone
        >>> backend.submit(Request(Op.ALL_REDUCE, torch.ones(2))).wait().tensor
        tensor([1., 1.])
        >>> backend.close()

    Reference:
        Li et al., 2020, VLDB (PyTorch Distributed); Patarasuk and Yuan, 2009, J. Parallel Distrib.
        Comput. (ring). Departs: fold and spread are a ring over send and recv, because Gloo's own
        reduce-scatter moves twice the bytes.
    """
    from testbed.backends.torch_groups.backend import open_gloo

    return open_gloo(group)


def _open_nccl(group: Group, options: object) -> Backend:
    """`nccl`: the collectives of torch.distributed between GPUs, by NCCL.

        all-reduce:  T(M) = 2 (n - 1) (alpha + beta M / n)

    n ranks, M bytes; alpha: seconds of one start-up; beta: seconds per byte of a link in one
    direction. NCCL chooses between rings and trees by itself; a ring is predicted and counted.

    Args:
        group: the job; one communicator is made for each channel. Several channels may wait for
            each other for ever, see the module.
        options: none.

    Raises:
        UsageError: an option is given; there are none.
        Unavailable: torch has no NCCL, no GPU is visible, or ranks share a GPU and NCCL refuses it.
        RankLost, DeadlineExceeded: of a request: a rank was lost, or is late.

    Example:
        >>> facts = NCCL.facts(None)
        >>> facts.algorithm, facts.bus_factor(4), sorted(facts.device_types)
        ('ring', 1.5, ['cuda'])

    Reference:
        Li et al., 2020, VLDB (PyTorch Distributed); NVIDIA, NCCL and nccl-tests, 2016 to 2025 (bus
        bandwidth). Departs: all-gathers of different sizes are padded to the longest.
    """
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
    """As `bucket`: torch's sizes, or one size for all."""
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
