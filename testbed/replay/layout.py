"""From a trace to modules: which of its tensors one module owns, and in which order they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import msgspec

from testbed.base.errors import UsageError
from testbed.base.trace import Trace


@dataclass(frozen=True)
class Run:
    """Neighbouring tensors of one module: what one call of it computes.

    Attributes:
        owner: dotted path of the module.
        tensors: indices in forward order.
    """

    owner: str
    tensors: tuple[int, ...]


def owned(trace: Trace) -> Trace:
    """The trace with names that parameters of modules can have: `module.parameter`.

    A name without a dot would belong to the model as a whole, and schedulers that update each layer
    just before its forward pass could not tell the layers apart; it becomes a module of its own.

    Raises:
        UsageError: there is no tensor, a name is empty or given twice, or one name is a parameter
            and the module of another.
    """
    names = [t.name if "." in t.name else f"{t.name}.weight" for t in trace.tensors]
    modules = {prefix for name in names for prefix in _prefixes(name)}
    for name in names:
        if not all(name.split(".")) or names.count(name) > 1 or name in modules:
            raise UsageError(
                f"trace {trace.name!r} cannot be replayed: tensor {name!r} is given twice, is also "
                "the module of another tensor, or has an empty part; expected distinct names such "
                "as layer1.weight"
            )
    if not names:
        raise UsageError(f"trace {trace.name!r} has no tensors; there is nothing to replay")
    tensors = tuple(
        msgspec.structs.replace(tensor, name=name)
        for tensor, name in zip(trace.tensors, names, strict=True)
    )
    return msgspec.structs.replace(trace, tensors=tensors)


def runs_of(names: Sequence[str]) -> list[Run]:
    """Neighbours with the same module, in forward order.

    Example:
        >>> [(run.owner, run.tensors) for run in runs_of(["a.weight", "a.bias", "b.c.weight"])]
        [('a', (0, 1)), ('b.c', (2,))]
    """
    owners = [name.rpartition(".")[0] for name in names]
    return [
        Run(owner, tuple(group))
        for owner, group in groupby(range(len(names)), key=owners.__getitem__)
    ]


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]
