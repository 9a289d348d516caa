"""What is submitted for an operation, and the command line that repeats a configuration."""

from __future__ import annotations

import random
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from testbed.base.types import Op
from testbed.records.comm import CommConfig, Operation

# What is submitted for an operation, one after the other.
OPS: Final[dict[Operation, tuple[Op, ...]]] = {
    "sum": (Op.ALL_REDUCE,),
    "fold-spread": (Op.FOLD, Op.SPREAD),
    "gather": (Op.ALL_GATHER,),
    "broadcast": (Op.BROADCAST,),
}


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


# Which sizes are measured, and in which order the backends take their turns: pure.


@dataclass(frozen=True, slots=True)
class Size:
    """One row of each backend.

    Attributes:
        num_bytes: bytes of the tensor (gather: of the result, all ranks' parts together).
        count: elements that each rank gives.
    """

    num_bytes: int
    count: int


def sizes(config: CommConfig) -> tuple[Size, ...]:
    """The sizes from min to max, each `factor` times the last, rounded down to whole elements.

    Example:
        >>> [s.num_bytes for s in sizes(CommConfig(backend=("gloo",), max_bytes=1 << 20))]
        [4096, 16384, 65536, 262144, 1048576]
    """
    unit = config.element_bytes * (config.workers if config.op == "gather" else 1)
    found: list[Size] = []
    num_bytes = config.min_bytes
    while num_bytes <= config.max_bytes:
        count = num_bytes // unit
        found.append(Size(count * unit, count))
        num_bytes *= config.factor
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Turn:
    """One exchange of one backend.

    Attributes:
        contestant: number of the backend.
        step: number of the exchange over the whole job, the same on all ranks.
        timed: it counts; warm-up does not.
        checked: every element of its result is compared.
    """

    contestant: int
    step: int
    timed: bool
    checked: bool


def turns(config: CommConfig, size: Size, first_step: int) -> Iterator[Turn]:
    """All exchanges of one size: rounds in which every backend has one turn, in a random order.

    The order is drawn anew for each round from the seed and the size, so a machine that grows busy
    slows all backends alike, none always follows the same other, and all ranks find the same order.

    Args:
        config: how many backends, rounds and checks, and the seed.
        size: the size.
        first_step: number of the first exchange.

    Example:
        >>> config = CommConfig(backend=("a", "b"), iters=1, warmup=1)
        >>> [(t.step, t.timed) for t in turns(config, Size(8, 2), 10)]
        [(10, False), (11, False), (12, True), (13, True)]
    """
    generator = random.Random(f"{config.seed}/{size.num_bytes}")
    order = list(range(len(config.backend)))
    num_rounds = config.warmup + config.iters
    for number in range(num_rounds):
        generator.shuffle(order)
        for place, contestant in enumerate(order):
            yield Turn(
                contestant,
                first_step + len(order) * number + place,
                timed=number >= config.warmup,
                checked=number >= num_rounds - config.check,
            )
