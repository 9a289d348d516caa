"""What one `testbed comm` measures, as one frozen value that a command line can repeat."""

from __future__ import annotations

import shlex
from typing import Final, Literal

import msgspec

from testbed.errors import UsageError
from testbed.nouns import Verb

Operation = Literal["sum", "fold-spread", "gather", "broadcast"]
Dtype = Literal["float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8"]
Device = Literal["cpu", "cuda"]

ELEMENT_BYTES: Final[dict[Dtype, int]] = {
    "float32": 4,
    "float64": 8,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
}

# What is submitted for an operation, one after the other.
VERBS: Final[dict[Operation, tuple[Verb, ...]]] = {
    "sum": (Verb.SUM,),
    "fold-spread": (Verb.FOLD, Verb.SPREAD),
    "gather": (Verb.GATHER,),
    "broadcast": (Verb.BROADCAST,),
}

# The largest integer up to which the dtype holds every integer.
EXACT_UP_TO: Final[dict[Dtype, int]] = {
    "float32": 1 << 24,
    "float64": 1 << 53,
    "float16": 1 << 11,
    "bfloat16": 1 << 8,
    "int64": 1 << 53,
    "int32": (1 << 31) - 1,
    "uint8": 255,
}


class CommConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which exchanges are measured over which backends.

    Attributes:
        backend: specifications, each a row of every size.
        workers: ranks that exchange.
        min_bytes: the smallest size.
        max_bytes: no size is above it.
        factor: each size is so many times the one before it.
        iters: timed exchanges of each backend and size.
        warmup: exchanges before them that are not timed.
        dtype: of the elements.
        op: what is exchanged: a sum (all-reduce), its two halves, a gather or a broadcast.
        check: of the timed exchanges, the last so many have every element compared; 0 = none.
        device: `cpu` or `cuda`: where the tensors are.
        deadline: seconds in which one exchange must be done.
        seed: of the order in which the backends take turns.
        threads: torch threads per rank; None = cores / ranks.

    Raises:
        UsageError: a value outside its range; says what is expected.
    """

    backend: tuple[str, ...]
    workers: int = 2
    min_bytes: int = 4 << 10
    max_bytes: int = 64 << 20
    factor: int = 4
    iters: int = 20
    warmup: int = 5
    dtype: Dtype = "float32"
    op: Operation = "sum"
    check: int = 1
    device: Device = "cpu"
    deadline: float = 10.0
    seed: int = 1
    threads: int | None = None

    def __post_init__(self) -> None:
        if not self.backend:
            raise UsageError("--backend names none; expected one or more, as mpi-ring,mpi,gloo")
        twice = {name for name in self.backend if self.backend.count(name) > 1}
        if twice:
            raise UsageError(f"--backend names {', '.join(sorted(twice))} more than once")
        for name, value, least in (
            ("workers", self.workers, 1),
            ("factor", self.factor, 2),
            ("iters", self.iters, 1),
            ("warmup", self.warmup, 0),
            ("check", self.check, 0),
            ("threads", self.threads, 1),
        ):
            if value is not None and value < least:
                raise UsageError(f"--{name} is {value}; expected {least} or more")
        if not self.deadline > 0:
            raise UsageError(f"--deadline is {self.deadline}; expected seconds above 0")
        if self.check > self.iters:
            raise UsageError(
                f"--check is {self.check} but --iters is {self.iters}; the checked exchanges are "
                "some of the timed ones: expected no more"
            )
        if self.workers > EXACT_UP_TO[self.dtype]:
            raise UsageError(
                f"{self.dtype} cannot hold the exact sum over {self.workers} workers, so that no "
                "result could be checked; use --dtype float32, or fewer workers"
            )
        self._check_sizes()

    def _check_sizes(self) -> None:
        if self.min_bytes > self.max_bytes:
            raise UsageError(
                f"--min is {self.min_bytes} bytes and --max is {self.max_bytes}; expected min <= "
                "max"
            )
        parts = self.workers if self.op == "gather" else 1
        if self.min_bytes < parts * self.element_bytes:
            whose = f" from each of {parts} workers" if parts > 1 else ""
            raise UsageError(
                f"--min is {self.min_bytes} bytes; expected at least {parts * self.element_bytes}: "
                f"one {self.dtype} element{whose}"
            )

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return ELEMENT_BYTES[self.dtype]


def to_arguments(config: CommConfig) -> list[str]:
    """The options of `testbed comm` that give this configuration.

    Example:
        >>> to_arguments(CommConfig(backend=("mpi:blocking=1", "gloo"), min_bytes=64, iters=5))[:6]
        ['--backend', 'mpi:blocking=1,gloo', '--workers', '2', '--min', '64']
    """
    default = CommConfig(backend=config.backend)
    arguments: list[str] = []
    for name in CommConfig.__struct_fields__:
        value = getattr(config, name)
        always = name in ("backend", "workers", "min_bytes", "max_bytes")
        if value == getattr(default, name) and not always:
            continue
        text = ",".join(value) if isinstance(value, tuple) else str(value)
        arguments += [f"--{name.removesuffix('_bytes')}", text]
    return arguments


def reproduce(config: CommConfig) -> str:
    """The shell command that measures the same again."""
    return shlex.join(["testbed", "comm", *to_arguments(config)])
