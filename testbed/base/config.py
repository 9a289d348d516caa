"""The whole configuration of one run, as one frozen value that a command line can repeat."""

from __future__ import annotations

import shlex
from typing import Any, Final, Literal

import msgspec

from testbed.base.errors import UsageError

START_S = 120.0  # of a start deadline that nobody gave

Precision = Literal["float32", "float64", "bf16", "fp16"]

LATER: Final = frozenset({"start_deadline"})
"""Fields that are younger than the first records; `identity` leaves them out at their default."""


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """One cell: a workload on a backend with so many workers, and everything that shapes the run.

    Names equal the options of `testbed run` (underscores for dashes). None means: the workload's
    own value.
    """

    workload: str = "digits-cnn"
    backend: str = "mpi-ring"
    workers: int = 2
    cluster: str | None = None
    scheduler: str = "wfbp"
    compressor: str = "none"
    trace: str | None = None
    link: str | None = None
    plan: str | None = None
    predict: bool = False
    steps: int | None = None
    epochs: int | None = None
    warmup: int | None = None
    batch_size: int | None = None
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    learning_rate: float | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: int = 0
    accumulate: int = 1
    clip_norm: float | None = None
    precision: Precision = "float32"
    seed: int = 1
    device: str = "cpu"
    threads: int | None = None
    data: str | None = None
    target_accuracy: tuple[float, ...] = ()
    evaluate_every: int | None = None
    verify_steps: int = 20
    slow: str | None = None
    deadline: float = 10.0
    start_deadline: float = START_S
    checkpoint: str | None = None
    every: int | None = None
    resume_from: str | None = None
    repeat: int = 0

    def __post_init__(self) -> None:
        positive = {
            "workers": self.workers,
            "steps": self.steps,
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "accumulate": self.accumulate,
            "deadline": self.deadline,
            "start_deadline": self.start_deadline,
            "every": self.every,
            "evaluate_every": self.evaluate_every,
            "threads": self.threads,
            "clip_norm": self.clip_norm,
            "learning_rate": self.learning_rate,
        }
        for name, value in positive.items():
            if value is not None and not value > 0:
                raise UsageError(
                    f"--{name.replace('_', '-')} is {value}; expected a number above 0"
                )
        at_least_zero = {
            "warmup": self.warmup,
            "warmup_steps": self.warmup_steps,
            "verify_steps": self.verify_steps,
            "momentum": self.momentum,
            "weight_decay": self.weight_decay,
        }
        for name, value in at_least_zero.items():
            if value is not None and not value >= 0:
                raise UsageError(f"--{name.replace('_', '-')} is {value}; expected 0 or more")
        for target in self.target_accuracy:
            if not 0 < target <= 1:
                raise UsageError(
                    f"--target-accuracy is {target}; expected 0 < accuracy <= 1, as 0.95"
                )
        if self.steps is not None and self.epochs is not None:
            raise UsageError("--steps and --epochs are both given; give one of them")
        if self.plan is not None and (self.trace or self.link):
            raise UsageError("--plan is a finished plan; leave out --trace and --link")
        if self.every is not None and self.checkpoint is None:
            raise UsageError("--every needs --checkpoint DIR: where are the checkpoints to go?")


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
        option = f"--{name.replace('_', '-')}"
        if value is True:
            arguments.append(option)
            continue
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        arguments += [option, text]
    return arguments


def reproduce(config: RunConfig) -> str:
    """The shell command that repeats this run."""
    return shlex.join(["testbed", "run", *to_arguments(config)])
