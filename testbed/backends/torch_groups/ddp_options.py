"""Options of `ddp`, and what they mean for a run; without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from testbed.backends.torch_groups.ddp_plan import taken
from testbed.base.axes import OwnSchedule
from testbed.base.config import RunConfig
from testbed.base.errors import UsageError
from testbed.base.knobs import Grid, Range, Space
from testbed.base.plan import Plan, load_plan

# What DistributedDataParallel takes where it is given no size of a bucket; a test asks torch.
BUCKET_MIB, FIRST_BUCKET_MIB = 25, 1

# From which step on PowerSGD of torch's hooks compresses; likewise.
POWERSGD_START = 1000


@dataclass(frozen=True)
class DdpOptions:
    """`ddp`: PyTorch's DistributedDataParallel, in place of a plan and its exchange.

        for bucket k in the order of the backward pass: when its last gradient is ready, all-reduce

    Each bucket of M bytes is predicted as a ring's all-reduce over n ranks, T(M) = 2 (n - 1) (alpha
    + beta M / n) with alpha in s and beta in s/byte, the buckets as those of the scheduler `bucket`
    with the same sizes, or those of the plan. What a hook compresses is not predicted.

    Attributes:
        over: whose collectives: `gloo`, over TCP; or `nccl`, between GPUs, as it is used there.
        bucket_mib: size of every bucket (`bucket_cap_mb`) in MiB; None = torch's own: 25, and 1 for
            the first bucket, so that sending begins early.
        bucket_view: gradients are views into the buckets (`gradient_as_bucket_view`), which saves
            their memory once and a copy each way.
        static_graph: the same parameters are used in every step (`static_graph`).
        hook: torch's own communication hook: `fp16` (each bucket is cast, all-reduced and cast
            back), `powersgd` (`PowerSGDState` with torch's defaults but for the two below). Torch's
            `bf16` needs NCCL and is no option here.
        rank: with `powersgd`: columns of P and Q (`matrix_approximation_rank`).
        start: with `powersgd`: the first step that compresses (`start_powerSGD_iter`); before it
            buckets are all-reduced whole.
        plan: testbed.plan/1 file whose messages become the buckets (`bucket_cap_mb_list`), as
            `testbed plan --for ddp` writes it. From the second step on; the first has other buckets
            while torch learns the order of gradients.

    Raises:
        UsageError: a size that is not above 0; options that exclude each other; a plan that DDP
            cannot carry out; a scheduler or a compressor is given, too.
        Unavailable: torch is not installed, was built without Gloo, or is too old for `plan`.
        RankLost, DeadlineExceeded: in a step: a rank was lost, or is late.

    Example:
        >>> schedule(DdpOptions()).like, schedule(DdpOptions(bucket_mib=10)).like
        ('bucket:mib=25,first_mib=1', 'bucket:mib=10,first_mib=10')

    Reference:
        Li et al., 2020, VLDB (PyTorch Distributed); Vogels et al., 2019, NeurIPS (PowerSGD).
        Departs: only by process groups of its own, so that the user's default group is left alone.
    """

    over: Literal["gloo", "nccl"] = "gloo"
    bucket_mib: float | None = None
    bucket_view: bool = False
    static_graph: bool = False
    hook: Literal["none", "fp16", "powersgd"] = "none"
    rank: int = 1
    start: int = POWERSGD_START
    plan: str | None = None

    def __post_init__(self) -> None:
        if self.bucket_mib is not None and not self.bucket_mib > 0:
            raise UsageError(
                f"ddp: bucket_mib is {self.bucket_mib:g}; expected a size above 0, or none for "
                "torch's own"
            )
        if self.plan is not None and self.bucket_mib is not None:
            raise UsageError(
                f"ddp: bucket_mib is {self.bucket_mib:g} and plan is {self.plan}; expected one of "
                "them, as both decide the sizes of buckets"
            )
        if self.rank < 1 or self.start < 2:
            raise UsageError(
                f"ddp: rank is {self.rank} and start {self.start}; expected a rank of 1 or more, "
                "and a start of 2 or more, because torch forms its buckets anew after the first "
                "step"
            )
        if self.hook != "powersgd" and (self.rank, self.start) != (1, POWERSGD_START):
            raise UsageError(
                f"ddp: rank and start are options of hook=powersgd, and hook is {self.hook}; "
                "leave them out, or write hook=powersgd"
            )


def refuses(options: Any, config: RunConfig) -> str | None:
    """What torch cannot do, or what would do nothing, in words."""
    assert isinstance(options, DdpOptions)
    if options.over == "nccl" and config.device == "cpu":
        return (
            "ddp:over=nccl exchanges what lies on GPUs, and --device is cpu; expected --device "
            "cuda, or leave out over=nccl"
        )
    if options.static_graph and config.accumulate > 1:
        return (
            f"ddp:static_graph=1 cannot stand beside --accumulate {config.accumulate}: torch "
            "counts in the first backward pass how often each parameter is used, and would count "
            "micro-batches that are not exchanged; leave out static_graph"
        )
    if options.plan is not None:
        exact_plan(options.plan)
    if options.hook != "powersgd":
        return None
    if config.checkpoint is not None or config.resume_from is not None:
        return (
            "ddp:hook=powersgd keeps what it did not send inside torch, where checkpoints do not "
            "reach it; use --compressor ef+powersgd, or leave out --checkpoint and --resume-from"
        )
    steps = config.steps if config.steps is not None or config.epochs is not None else 100
    if steps is not None and steps <= options.start:
        return (
            f"ddp:hook=powersgd compresses from step {options.start} on (torch's "
            f"start_powerSGD_iter), and this run has {steps} steps; write "
            "ddp:hook=powersgd,start=2, or train longer"
        )
    return None


def knobs(options: Any) -> Space:
    """What a search may set; the sizes of buckets are given where a plan is.

    The link model knows the size alone: runs decide about the others.
    """
    assert isinstance(options, DdpOptions)
    both = Grid((False, True))
    size = {} if options.plan is not None else {"bucket_mib": Range(1, 128)}
    return {**size, "bucket_view": both, "static_graph": both}


def described(options: object) -> str:
    """What the wrapper sets, in words.

    Example:
        >>> described(DdpOptions(static_graph=True))
        'buckets of 25 MiB, the first of 1 MiB, static_graph'
    """
    assert isinstance(options, DdpOptions)
    size = f"buckets of {options.bucket_mib or BUCKET_MIB:g} MiB"
    if options.plan is not None:
        size = f"buckets of {options.plan}"
    elif options.bucket_mib is None:
        size += f", the first of {FIRST_BUCKET_MIB} MiB"
    flags = [n for n in ("bucket_view", "static_graph") if getattr(options, n)]
    over = ["over NCCL"] if options.over == "nccl" else []
    return ", ".join([size, *flags, *over])


def exact_plan(path: str) -> Plan:
    """The plan of a file, where DDP's buckets can be its messages.

    Raises:
        UsageError: it cannot be read, or DDP can do something near to it at best.
    """
    plan = load_plan(Path(path))
    found = taken(plan)
    if found.differences:
        raise UsageError(
            f"ddp:plan={path}: DDP cannot carry it out as it is: {'; '.join(found.differences)}; "
            f"testbed plan {path} --for ddp --plan-out FILE writes what it can do instead"
        )
    return found.plan


def schedule(options: object) -> OwnSchedule:
    """As `bucket`: torch's sizes, or one size for all; or as a plan."""
    assert isinstance(options, DdpOptions)
    size, first = options.bucket_mib or BUCKET_MIB, options.bucket_mib or FIRST_BUCKET_MIB
    return OwnSchedule(
        "ddp",
        f"bucket:mib={size:g},first_mib={first:g}",
        plan_file=options.plan or "",
        takes=taken,
        compresses=options.hook != "none",
    )
