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
of another cannot run beside them, ranks can wait for each other for ever. One channel is safe, and
is all that ranks that share a GPU may have: there it was seen to happen.
"""

from __future__ import annotations

from testbed.backends.protocol import Backend, Group
from testbed.backends.torch_groups.ddp_options import (
    DdpOptions,
    described,
    knobs,
    refuses,
    schedule,
)
from testbed.base.axes import BackendFacts
from testbed.base.parts import PUBLISHED, Part, installed


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
        UsageError: an option is given, there are none; or several channels, and ranks share a GPU.
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
    return DdpBackend(group, options)


def _probe_nccl() -> tuple[str, str] | None:
    from testbed.backends.torch_groups.nccl import probe_nccl

    return probe_nccl()


_GLOO, _NCCL = "Gloo", "NCCL"
_PROBE_GLOO = installed("torch", "pip install torch")

GLOO = Part(
    name="gloo",
    summary="torch.distributed's Gloo all-reduce over TCP",
    build=_open_gloo,
    facts=lambda options: BackendFacts(algorithm="ring", transport=_GLOO),
    probe=_PROBE_GLOO,
)

NCCL = Part(
    name="nccl",
    summary="torch.distributed's NCCL all-reduce between GPUs",
    build=_open_nccl,
    facts=lambda options: BackendFacts(
        algorithm="ring", device_types=frozenset({"cuda"}), transport=_NCCL
    ),
    probe=_probe_nccl,
)

DDP = Part(
    name="ddp",
    summary="PyTorch's DistributedDataParallel over Gloo or NCCL, as it comes (over=nccl, "
    "bucket_mib, bucket_view=1, static_graph=1, hook=fp16|powersgd, plan=FILE)",
    origin=PUBLISHED,
    build=_open_ddp,
    options=DdpOptions,
    facts=lambda options: BackendFacts(
        algorithm="ring",
        device_types=frozenset({"cuda" if options.over == "nccl" else "cpu"}),
        schedule=schedule(options),
        transport=_NCCL if options.over == "nccl" else _GLOO,
        sets=described(options),
    ),
    probe=_PROBE_GLOO,
    refuses=refuses,
    knobs=knobs,
)
