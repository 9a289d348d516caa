"""What a memory strategy asks for: one value that the engines of a run go by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from testbed.base.errors import UsageError

if TYPE_CHECKING:
    import torch

    from testbed.memory.lifetimes import Lifetimes
    from testbed.memory.plan import MemoryPlan

    Choose = Callable[[Lifetimes], MemoryPlan]
    Prepare = Callable[[torch.nn.Module, torch.optim.Optimizer], None]


@dataclass(frozen=True)
class Release:
    """A gradient is freed when its message has left, and the optimizer steps as means arrive.

    Attributes:
        in_flight: messages whose buffers exist at once.
        poisons: buffers are overwritten when they are given back (see `memory.arena`); for tests.
    """

    in_flight: int = 2
    poisons: bool = dataclasses.field(default=False, repr=False)


@dataclass(frozen=True)
class Mirror:
    """What was not sent stays as the difference between the weights and a mirror of them.

    Attributes:
        where: memory that holds it: that of the `device`, or that of the `host`.
        form: the `difference` itself is stored, or the mirror's `weights`.
    """

    where: Literal["device", "host"] = "device"
    form: Literal["difference", "weights"] = "difference"


@dataclass(frozen=True)
class Strategy:
    """How a worker saves memory.

    Attributes:
        choose: what becomes of each activation, from the lifetimes of one step; None: all stay.
        release: what becomes of gradients; None: all stay until the optimizer's step.
        mirror: what becomes of what a compressor did not send; None: the compressor keeps it.
        prepare: called once, with what trains, before the first step.
    """

    choose: Choose | None = None
    release: Release | None = None
    mirror: Mirror | None = None
    prepare: Prepare | None = None


KEEP_ALL: Final = Strategy()


def combined(strategies: Sequence[tuple[str, Strategy]]) -> Strategy:
    """One strategy from those of a chain, each with its name.

    Raises:
        UsageError: two of them decide about the same; names them.

    Example:
        >>> both = combined([("a", Strategy(release=Release())), ("b", Strategy(mirror=Mirror()))])
        >>> both.release, both.mirror
        (Release(in_flight=2), Mirror(where='device', form='difference'))
    """
    found: dict[str, object] = {}
    owners: dict[str, str] = {}
    for name, strategy in strategies:
        for field in dataclasses.fields(Strategy):
            value = getattr(strategy, field.name)
            if value is None:
                continue
            if field.name in found:
                raise UsageError(
                    f"memory {owners[field.name]!r} and {name!r} both decide about "
                    f"{_ABOUT[field.name]}; expected one of them, and beside it a strategy for "
                    "something else, as in checkpoint+release"
                )
            found[field.name], owners[field.name] = value, name
    return Strategy(**found)  # type: ignore[arg-type]


_ABOUT = {
    "choose": "activations",
    "release": "gradients",
    "mirror": "what a compressor did not send",
    "prepare": "the model and its optimizer",
}
