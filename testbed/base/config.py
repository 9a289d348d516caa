"""The whole configuration of one run, as one frozen value that a command line can repeat."""

from __future__ import annotations

import functools
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints

import msgspec

from testbed.base.errors import UnknownName, UsageError
from testbed.base.units import parse_seconds

START_S = 120.0  # of a start deadline that nobody gave

Precision = Literal["float32", "float64", "bf16", "fp16"]

LATER: Final = frozenset(
    {"start_deadline", "memory", "budget_mb", "measure_memory", "max_batch", "rehearse"}
    | {"tune", "tuned", "target_loss"}
)
"""Fields that are younger than the first records; `identity` leaves them out at their default."""


def read_targets(text: str) -> tuple[float, ...]:
    """Accuracies or losses to note.

    Raises:
        UsageError: a piece is no number.

    Example:
        >>> read_targets("0.95,0.97")
        (0.95, 0.97)
    """
    try:
        return tuple(float(piece) for piece in text.split(",") if piece)
    except ValueError as error:
        raise UsageError(f"targets are {text!r}; expected e.g. 0.95 or 0.95,0.97") from error


@dataclass(frozen=True)
class Setting:
    """What a command line and the checks have to know of a field of `RunConfig`.

    Attributes:
        help: for people; the choices of a `Literal` are added to it.
        unset: what help shows as the default of a field that the command line may leave open.
        above: a value must be larger than this.
        least: a value must not be smaller than this.
        listed: a sweep may be given several values, separated by commas.
        read: text to value; None: the field's type says how.
        hidden: help does not list it.
    """

    help: str = ""
    unset: str = ""
    above: float | None = None
    least: float | None = None
    listed: bool = False
    read: Callable[[str], Any] | None = None
    hidden: bool = False


_PART = "name[:key=value,...]; see testbed list"


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """One cell: a workload on a backend with so many workers, and everything that shapes the run.

    Names equal the options of `testbed run` (underscores for dashes). None means: the workload's
    own value.
    """

    workload: Annotated[
        str, Setting("what is trained: name[:key=value,...] or file.py:function", listed=True)
    ] = "digits-cnn"
    backend: Annotated[str, Setting(f"what exchanges gradients: {_PART}", listed=True)] = "mpi-ring"
    workers: Annotated[
        int,
        Setting(
            "training processes",
            unset="2; under a launcher: what it started; in a cluster: its places",
            above=0,
            listed=True,
        ),
    ] = 2
    cluster: Annotated[
        str | None,
        Setting(
            "emulate a cluster: nodes=4,rate=10gbit,dilation=10; see testbed cluster", unset="none"
        ),
    ] = None
    scheduler: Annotated[str, Setting(f"when gradients leave: {_PART}", listed=True)] = "wfbp"
    compressor: Annotated[
        str,
        Setting(
            "what gradients are made smaller by: name[:key=value,...], wrappers before it with +: "
            "ef+topk:ratio=0.01; see testbed list",
            listed=True,
        ),
    ] = "none"
    memory: Annotated[str, Setting(f"how a worker saves memory: {_PART}", listed=True)] = "none"
    budget_mb: Annotated[
        float | None,
        Setting(
            "MiB that a step's live storages may take, communication included; a run that would "
            "take more is refused",
            unset="none",
            above=0,
            listed=True,
        ),
    ] = None
    measure_memory: Annotated[
        bool, Setting("foresee and measure the peak of a step, as runs with --memory always do")
    ] = False
    max_batch: Annotated[
        bool, Setting("with --budget-mb: train with the largest batch that fits")
    ] = False
    trace: Annotated[
        str | None,
        Setting("plan from this trace: testbed.trace/1 file or shipped name", unset="made"),
    ] = None
    link: Annotated[
        str | None,
        Setting(
            "plan for this link: a testbed.link/1 file, or nominal numbers: "
            "rate=10gbit,latency=50us",
            unset="measured",
        ),
    ] = None
    plan: Annotated[str | None, Setting("run this plan (testbed.plan/1)")] = None
    predict: Annotated[
        bool,
        Setting(
            "profile first, and predict the step time: held-out on the link that --link gives, "
            "null on nominal numbers, calibrated on one that is measured here without --link"
        ),
    ] = False
    rehearse: Annotated[
        bool,
        Setting(
            "with --predict and without --link: correct the link by the messages of a few steps of "
            "a replay in this very run; what is then predicted is no forecast"
        ),
    ] = False
    tune: Annotated[
        str | None,
        Setting(
            "search the knobs of the scheduler, or of a framework, first: "
            "trials=30,confirm=3,steps=15,seed=1: so many settings on the link model, of which the "
            "best are run for so many steps; needs --link or --cluster",
            unset="no search",
        ),
    ] = None
    tuned: Annotated[str, Setting("the budget of a search that found the knobs", hidden=True)] = ""
    steps: Annotated[
        int | None, Setting("steps to train", unset="100 without epochs", above=0, listed=True)
    ] = None
    epochs: Annotated[
        int | None, Setting("epochs to train, instead of steps", above=0, listed=True)
    ] = None
    warmup: Annotated[
        int | None,
        Setting("first steps that are not measured", unset="5, or half if few", least=0),
    ] = None
    batch_size: Annotated[
        int | None,
        Setting("samples per worker and micro-batch", unset="the workload's", above=0, listed=True),
    ] = None
    optimizer: Annotated[
        Literal["sgd", "adam", "adamw"], Setting("of the parameters", listed=True)
    ] = "sgd"
    learning_rate: Annotated[
        float | None, Setting("of the optimizer", unset="the workload's", above=0, listed=True)
    ] = None
    momentum: Annotated[
        float | None, Setting("of SGD", unset="the workload's", least=0, listed=True)
    ] = None
    weight_decay: Annotated[
        float | None, Setting("of the optimizer", unset="the workload's", least=0, listed=True)
    ] = None
    schedule: Annotated[
        Literal["constant", "cosine", "linear"], Setting("of the learning rate", listed=True)
    ] = "constant"
    warmup_steps: Annotated[
        int, Setting("steps of linear learning-rate warm-up", least=0, listed=True)
    ] = 0
    accumulate: Annotated[int, Setting("micro-batches per step", above=0, listed=True)] = 1
    clip_norm: Annotated[
        float | None, Setting("clip gradients to this global norm", above=0, listed=True)
    ] = None
    precision: Annotated[
        Precision, Setting("of the forward and backward pass; bf16, fp16: mixed", listed=True)
    ] = "float32"
    seed: Annotated[int, Setting("of weights, sample order and dropout", listed=True)] = 1
    device: Annotated[str, Setting("cpu or cuda", listed=True)] = "cpu"
    threads: Annotated[
        int | None, Setting("torch threads per rank", unset="cores / ranks", above=0, listed=True)
    ] = None
    data: Annotated[
        str | None, Setting("folder of the data set (CIFAR-10, ImageNet)", unset="synthetic")
    ] = None
    target_accuracy: Annotated[
        tuple[float, ...], Setting("note when these are reached: 0.95,0.97", read=read_targets)
    ] = ()
    target_loss: Annotated[
        tuple[float, ...],
        Setting("note when the loss of the test samples is at these: 2.5,2.3", read=read_targets),
    ] = ()
    evaluate_every: Annotated[
        int | None, Setting("steps between evaluations", unset="an epoch", above=0)
    ] = None
    verify_steps: Annotated[
        int, Setting("steps compared with one process; 0 = do not", least=0)
    ] = 20
    slow: Annotated[str | None, Setting("hold up workers: rank=1,delay=50ms[,every=8][;...]")] = (
        None
    )
    deadline: Annotated[
        float, Setting("a lost rank ends the run within this time", above=0, read=parse_seconds)
    ] = 10.0
    start_deadline: Annotated[
        float,
        Setting(
            "all ranks must have started and joined within this time", above=0, read=parse_seconds
        ),
    ] = START_S
    checkpoint: Annotated[str | None, Setting("folder to save checkpoints in")] = None
    every: Annotated[
        int | None, Setting("steps between checkpoints", unset="only the last", above=0)
    ] = None
    resume_from: Annotated[str | None, Setting("folder of checkpoints to go on from")] = None
    repeat: Annotated[int, Setting("number of the repeat, for the record", hidden=True)] = 0

    def __post_init__(self) -> None:
        for name, (_, setting) in settings().items():
            value = getattr(self, name)
            if value is None:
                continue
            if setting.above is not None and not setting.above < value < math.inf:
                finite = "finite " if value == math.inf else ""
                raise UsageError(f"{option(name)} is {value}; expected a {finite}number above 0")
            if setting.least is not None and not value >= setting.least:
                raise UsageError(f"{option(name)} is {value}; expected 0 or more")
        for target in self.target_accuracy:
            if not 0 < target <= 1:
                raise UsageError(
                    f"--target-accuracy is {target}; expected 0 < accuracy <= 1, as 0.95"
                )
        if not all(0 < target < math.inf for target in self.target_loss):
            raise UsageError(
                f"--target-loss is {self.target_loss}; expected losses above 0, as 2.5"
            )
        if self.steps is not None and self.epochs is not None:
            raise UsageError("--steps and --epochs are both given; give one of them")
        if self.plan is not None and (self.trace or self.link):
            raise UsageError("--plan is a finished plan; leave out --trace and --link")
        if self.rehearse and (not self.predict or self.link is not None):
            raise UsageError(
                "--rehearse corrects the link that a prediction measures; expected --predict and "
                "no --link beside it"
            )
        if self.every is not None and self.checkpoint is None:
            raise UsageError("--every needs --checkpoint DIR: where are the checkpoints to go?")


@functools.cache
def settings() -> Mapping[str, tuple[Any, Setting]]:
    """Type and `Setting` of each field of `RunConfig`, in their order."""
    hints = get_type_hints(RunConfig, include_extras=True)
    return {name: get_args(hints[name])[:2] for name in RunConfig.__struct_fields__}


def option(name: str) -> str:
    """The field's option on a command line.

    Example:
        >>> option("batch_size")
        '--batch-size'
    """
    return f"--{name.replace('_', '-')}"


def read_values(name: str, texts: Sequence[str]) -> tuple[Any, ...]:
    """Texts of a command line as values of a field.

    Raises:
        UnknownName: no such field.
        UsageError: a text is no value of it.

    Example:
        >>> read_values("workers", ["2", "4"]), read_values("deadline", ["500ms"])
        ((2, 4), (0.5,))
    """
    if name not in FIELDS:
        raise UnknownName("setting", name, FIELDS)
    kind, setting = settings()[name]
    try:
        if setting.read is not None:
            return tuple(map(setting.read, texts))
        for text in texts:
            _check_choice(name, text)
        return tuple(msgspec.convert(text, kind, strict=False) for text in texts)
    except UsageError as error:
        raise (
            error if option(name) in str(error) else UsageError(f"{option(name)}: {error}")
        ) from None
    except msgspec.ValidationError as error:
        raise UsageError(f"{option(name)} is {','.join(texts)!r}: {error}") from None


def _check_choice(name: str, value: object) -> None:
    kind = settings()[name][0]
    if get_origin(kind) is Literal and value not in get_args(kind):
        raise UsageError(f"{option(name)} is {value!r}; expected {' or '.join(get_args(kind))}")


def make_config(values: Mapping[str, Any]) -> RunConfig:
    """A checked configuration from plain values, as TOML or a command line gives them.

    Raises:
        UsageError: an unknown field or a value of the wrong kind.

    Example:
        >>> make_config({"workers": 4, "target_accuracy": [0.9]}).target_accuracy
        (0.9,)
    """
    for name, value in values.items():
        if name not in settings():
            raise UnknownName("setting", name, FIELDS)
        _check_choice(name, value)
    try:
        return msgspec.convert(dict(values), RunConfig)
    except msgspec.ValidationError as error:
        # The library wraps what __post_init__ raised; the plain message is the one for the user.
        if isinstance(error.__cause__, UsageError):
            raise error.__cause__ from None
        raise UsageError(f"{error}; see `testbed run --help` for the values") from None


FIELDS: Final = tuple(name for name in RunConfig.__struct_fields__ if name != "repeat")
"""What a run may be given; the number of the repeat is the sweep's."""


def identity(config: RunConfig) -> dict[str, Any]:
    """The values that name a run's records, in the order of the fields.

    A configuration that does not use a younger field has the identity that it had before there was
    the field, so that sweeps and studies that were begun then go on.

    Example:
        >>> identity(RunConfig()) == identity(RunConfig(start_deadline=60.0))
        False
        >>> "start_deadline" in identity(RunConfig())
        False
    """
    values: dict[str, Any] = msgspec.to_builtins(config)
    default = RunConfig()
    for name in LATER:
        if getattr(config, name) == getattr(default, name):
            del values[name]
    return values


def to_arguments(config: RunConfig) -> list[str]:
    """The options of `testbed run` that give this configuration; most defaults are left out.

    Example:
        >>> to_arguments(RunConfig(backend="gloo", workers=4, steps=20))
        ['--workload', 'digits-cnn', '--backend', 'gloo', '--workers', '4', '--steps', '20']
    """
    arguments: list[str] = []
    default = RunConfig()
    for name in RunConfig.__struct_fields__:
        value = getattr(config, name)
        named = name in ("workload", "backend", "workers")
        if name == "repeat" or (value == getattr(default, name) and not named):
            continue
        if value is True:
            arguments.append(option(name))
            continue
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        arguments += [option(name), text]
    return arguments


def reproduce(config: RunConfig) -> str:
    """The shell command that repeats this run."""
    return shlex.join(["testbed", "run", *to_arguments(config)])
