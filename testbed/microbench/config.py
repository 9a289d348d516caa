"""What is submitted for an operation, and the command line that repeats a configuration."""

from __future__ import annotations

import shlex
from typing import Final

from testbed.nouns import Verb
from testbed.records.comm import CommConfig, Operation

# What is submitted for an operation, one after the other.
VERBS: Final[dict[Operation, tuple[Verb, ...]]] = {
    "sum": (Verb.SUM,),
    "fold-spread": (Verb.FOLD, Verb.SPREAD),
    "gather": (Verb.GATHER,),
    "broadcast": (Verb.BROADCAST,),
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
