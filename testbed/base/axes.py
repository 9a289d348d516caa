"""The axes of a run, the parts of each, and what generic code may ask of a part: one table.

Everything that a run chooses a part of is one entry here and one field of `RunConfig`. The command
line, the grid of a sweep, `testbed list`, labels, columns, entry-point groups and records go
through `AXES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from testbed.base.config import RunConfig
from testbed.base.parts import Axis, Registry
from testbed.base.plan import Plan
from testbed.base.types import BSP, NOTHING_MOVES


@dataclass(frozen=True)
class Taken:
    """What another framework makes of a plan.

    Attributes:
        plan: what it carries out.
        setting: what the framework is told to make it do so.
        differences: from the plan that was given, in words; none = it carries out that plan.
    """

    plan: Plan
    setting: str
    differences: tuple[str, ...] = ()


@dataclass(frozen=True)
class OwnSchedule:
    """How a backend that is another framework exchanges gradients.

    Attributes:
        name: what tables show as its scheduler.
        like: the scheduler that describes it best, for predictions.
        plan_file: of the plan that it was told to carry out; empty: none.
        takes: what it makes of a plan, raises UsageError where it can make nothing of it; None = it
            takes no plans.
        compresses: what it sends is smaller than gradients, so that nothing is predicted.
    """

    name: str
    like: str
    plan_file: str = ""
    takes: Callable[[Plan], Taken] | None = None
    compresses: bool = False


@dataclass(frozen=True)
class BackendFacts:
    """What a backend declares under its options.

    Attributes:
        needs_mpi: its ranks must be started by an MPI launcher.
        in_process: its ranks are threads of one process (no launcher at all).
        num_servers: dedicated server processes that it asks for.
        serve: what such a process runs until the workers have left: `serve(group, options)`.
        consistency: what it promises: `bsp`, `ssp:<staleness>`, `async` or `none`.
        device_types: where its tensors live; others are staged through host memory.
        schedule: how it exchanges gradients by itself; None = it carries out any plan.
        updates: its servers run the optimizer, so that no mean gradients come back.
        max_channels: over how many channels short messages may be spread so that their latencies
            overlap; 1 where ranks that begin them in different orders could wait for ever.
        algorithm: what predictions at other numbers of workers and of compressed messages go by
            (see `prediction.algorithms`); None = nothing is predicted.
        bus_factor: busbw / algbw of a sum over n workers (see `testbed comm`).
        busiest_link: whose network link carries most among n workers, in words; None = every
            worker's carries the same.
        transport: whose connections carry its bytes; backends of one transport are compared with
            each other first. Empty: its own.
        sets: settings of the transport that the backend chooses itself, in words for reports.
        variables: of the environment, that configure the transport; reports show those set.
    """

    needs_mpi: bool = False
    in_process: bool = False
    num_servers: int = 0
    serve: Callable[[Any, Any], None] | None = None
    consistency: str = "bsp"
    device_types: frozenset[str] = frozenset({"cpu"})
    schedule: OwnSchedule | None = None
    updates: bool = False
    max_channels: int = 1
    algorithm: str | None = None
    bus_factor: Callable[[int], float] = lambda n: 2 * (n - 1) / n
    busiest_link: Callable[[int], str] | None = None
    transport: str = ""
    sets: str = ""
    variables: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether workers train what one process with all samples would."""
        compresses = self.schedule is not None and self.schedule.compresses
        return self.consistency == BSP and not compresses

    @property
    def exchanges(self) -> bool:
        """Whether ranks exchange anything; else each is alone with its own samples."""
        return self.consistency != NOTHING_MOVES


@dataclass(frozen=True)
class SchedulerFacts:
    """What a scheduler declares under its options.

    Attributes:
        needs_profile: whether the plan depends on times; else sizes alone decide.
        crosses_iteration: whether messages may still travel during the next forward pass.
        overlaps: whether messages travel during the backward pass.
        sparse: its messages are meant for a compressor with a ratio.
        chooses: it tries the other schedulers and takes one.
        baseline: one of the plain methods that others are compared with.
        tried: of `auto`'s candidates, those with this scheduler: options as text.
        tried_of_many: the same for a model of more than 1000 tensors; None = no fewer.
        outdone: note below a simulation's table where this scheduler is not the fastest.
        exact: a step's means are of that step's gradients.
        within_iteration: the options to plan with where every step needs the whole mean gradient
            (clipping, an fp16 scaler) and nothing overlaps the next forward pass; None = these.
    """

    needs_profile: bool = True
    crosses_iteration: bool = False
    overlaps: bool = True
    sparse: bool = False
    chooses: bool = False
    baseline: bool = False
    tried: tuple[str, ...] = ()
    tried_of_many: tuple[str, ...] | None = None
    outdone: str = ""
    exact: bool = True
    within_iteration: Any = None


@dataclass(frozen=True)
class CompressorFacts:
    """What a compressor declares under its options.

    Attributes:
        merged_by: what a parameter server may be told to merge its payloads by: word -> class.
        carries_momentum: it does the momentum of SGD itself, so the optimizer must have none.
        exact: means are those of the gradients themselves, up to rounding.
        requantised: servers encode the mean again unless they are told not to.
    """

    merged_by: Mapping[str, type] = field(default_factory=dict)
    carries_momentum: bool = False
    exact: bool = False
    requantised: bool = False


@dataclass(frozen=True)
class WorkloadFacts:
    """What a workload declares under its options.

    Attributes:
        num_parameters: the published count at default options, if there is one.
        stretches: its compute is spent as waiting and can be stretched: `build` also gets
            `dilation=`, how many times slower than the real thing it is to run.
        imports: modules that building it imports beside torch and its own, so that they can be
            imported before the ranks are started.
        exact: its gradients are those of its samples.
    """

    num_parameters: int | None = None
    stretches: bool = False
    imports: tuple[str, ...] = ()
    exact: bool = True


@dataclass(frozen=True)
class MemoryFacts:
    """What a memory strategy declares under its options.

    Attributes:
        exact: the model trains to the same parameters as without it.
    """

    exact: bool = True


# The table. `build` of a workload is called as `build(options, data_dir=..., seed=...)` under a
# seeded torch generator, of a backend as `build(group, options)`, of a scheduler as
# `build(trace, link, options)`, of a compressor as `build(options)` or `build(inner, options)`, of
# a memory strategy as `build(options)`, which returns a `memory.strategy.Strategy`.

WORKLOADS: Final = Axis(
    "workload",
    {
        "digits-mlp": "testbed.models.digits:DIGITS_MLP",
        "digits-cnn": "testbed.models.digits:DIGITS_CNN",
        "resnet20": "testbed.models.resnet:RESNET20",
        "resnet56": "testbed.models.resnet:RESNET56",
        "resnet110": "testbed.models.resnet:RESNET110",
        "resnet50": "testbed.models.resnet:RESNET50",
        "resnet101": "testbed.models.resnet:RESNET101",
        "resnet152": "testbed.models.resnet:RESNET152",
        "vgg16": "testbed.models.vgg:VGG16",
        "densenet161": "testbed.models.densenet:DENSENET161",
        "densenet201": "testbed.models.densenet:DENSENET201",
        "inception-v4": "testbed.models.inception_v4:INCEPTION_V4",
        "googlenet": "testbed.models.googlenet:GOOGLENET",
        "alexnet": "testbed.models.alexnet:ALEXNET",
        "bert-base": "testbed.models.transformer:BERT_BASE",
        "bert-large": "testbed.models.transformer:BERT_LARGE",
        "gpt2": "testbed.models.transformer:GPT2",
        "byte-gpt": "testbed.models.language:BYTE_GPT",
        "replay": "testbed.replay.kind:REPLAY",
    },
    "testbed.workloads",
    WorkloadFacts,
    own="testbed.workloads.user_file:user_part",
    is_light=False,
    shown=True,
    same_work=False,
    resumes=False,
)

BACKENDS: Final = Axis(
    "backend",
    {
        "loopback": "testbed.backends.loopback:LOOPBACK",
        "none": "testbed.backends.none:NONE",
        "mpi-ring": "testbed.backends.mpi:MPI_RING",
        "mpi": "testbed.backends.mpi:MPI_LIBRARY",
        "gloo": "testbed.backends.torch_groups:GLOO",
        "zmq-ps": "testbed.backends.zmq_ps:ZMQ_PS",
        "nccl": "testbed.backends.torch_groups:NCCL",
        "ddp": "testbed.backends.torch_groups:DDP",
    },
    "testbed.backends",
    BackendFacts,
    aliases={"peer:ddp": "ddp", "peer": "ddp"},  # as records and command lines once called it
    shown=True,
)

# From the simplest to the most involved: `auto` takes the first of equal predictions.
SCHEDULERS: Final = Axis(
    "scheduler",
    {
        "sequential": "testbed.scheduling.wfbp:SEQUENTIAL",
        "wfbp": "testbed.scheduling.wfbp:WFBP",
        "bucket": "testbed.scheduling.bucket:BUCKET",
        "cycle": "testbed.scheduling.cycle:CYCLE",
        "mg-wfbp": "testbed.scheduling.mg_wfbp:MG_WFBP",
        "osf": "testbed.scheduling.osf:OSF",
        "optimal": "testbed.scheduling.optimal:OPTIMAL",
        "asc-wfbp": "testbed.scheduling.asc_wfbp:ASC_WFBP",
        "dear": "testbed.scheduling.dear:DEAR",
        "bytescheduler": "testbed.scheduling.bytescheduler:BYTESCHEDULER",
        "p3": "testbed.scheduling.p3:P3",
        "pace": "testbed.scheduling.pace:PACE",
        "omgs": "testbed.scheduling.omgs:OMGS",
        "lags": "testbed.scheduling.lags:LAGS",
        "auto": "testbed.scheduling.auto:AUTO",
    },
    "testbed.schedulers",
    SchedulerFacts,
    noted=False,  # notes name the plan's scheduler, which a backend of its own may have chosen
)

COMPRESSORS: Final = Axis(
    "compressor",
    {
        "none": "testbed.compression.none:NONE",
        "fp16": "testbed.compression.casts:FP16",
        "bf16": "testbed.compression.casts:BF16",
        "topk": "testbed.compression.topk:TOPK",
        "topk-sampled": "testbed.compression.topk:TOPK_SAMPLED",
        "randomk": "testbed.compression.randomk:RANDOMK",
        "threshold": "testbed.compression.topk:THRESHOLD",
        "dgc": "testbed.compression.dgc:DGC",
        "gtopk": "testbed.compression.gtopk:GTOPK",
        "oktopk": "testbed.compression.oktopk:OKTOPK",
        "sign": "testbed.compression.sign:SIGN",
        "ef-sign": "testbed.compression.sign:EF_SIGN",
        "onebit": "testbed.compression.sign:ONEBIT",
        "qsgd": "testbed.compression.quantize:QSGD",
        "terngrad": "testbed.compression.quantize:TERNGRAD",
        "natural": "testbed.compression.quantize:NATURAL",
        "powersgd": "testbed.compression.lowrank:POWERSGD",
        "acp-sgd": "testbed.compression.lowrank:ACP_SGD",
        "ef": "testbed.compression.wrappers:EF",
        "warmup": "testbed.compression.wrappers:WARMUP",
        "by-size": "testbed.compression.wrappers:BY_SIZE",
    },
    "testbed.compressors",
    CompressorFacts,
    chains=True,
    resumes=False,
)

MEMORY: Final = Axis(
    "memory",
    {
        "none": "testbed.memory.none:NONE",
        "release": "testbed.memory.release:RELEASE",
        "mirror": "testbed.memory.mirror:MIRROR",
        "checkpoint": "testbed.memory.checkpoint:CHECKPOINT",
        "offload": "testbed.memory.offload:OFFLOAD_PART",
        "inplace": "testbed.memory.inplace:INPLACE",
        "laysa": "testbed.memory.layer_centric:LAYSA",
        "auto": "testbed.memory.layer_centric:AUTO",
    },
    "testbed.memory",
    MemoryFacts,
    chains=True,
    beside=True,
    same_step=False,
)

AXES: Final[tuple[Axis[Any], ...]] = (WORKLOADS, BACKENDS, SCHEDULERS, COMPRESSORS, MEMORY)


def inexact_parts(config: RunConfig) -> dict[str, str]:
    """The parts of a run for which it trains to other parameters than one process would, by axis.

    Example:
        >>> inexact_parts(RunConfig(compressor="ef+topk", backend="zmq-ps:consistency=async"))
        {'backend': 'zmq-ps:consistency=async', 'compressor': 'ef+topk'}
    """
    parts = {axis.what: axis.resolve(axis.of(config)) for axis in AXES}
    return {
        what: part.text
        for what, part in parts.items()
        if not all(link.facts.exact for link in part.links)
    }


STUDIES: Final = Registry(
    "study",
    {
        "paper-shapes": "testbed.studies.published.study:PAPER_SHAPES",
        "laysa": "testbed.studies.laysa:LAYSA",
        "accuracy-compressed": "testbed.studies.accuracy.digits:ACCURACY_COMPRESSED",
        "loss-compressed": "testbed.studies.accuracy.loss:LOSS_COMPRESSED",
        "time-to-loss": "testbed.studies.accuracy.time_to_loss:TIME_TO_LOSS",
        "aa": "testbed.studies.aa:AA",
        "map": "testbed.studies.map.study:MAP",
    },
    "testbed.studies",
)
