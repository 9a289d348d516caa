"""What a memory strategy asks for: one value that the engines of a run go by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal

from testbed.base.errors import UsageError

if TYPE_CHECKING:
    import torch

    from testbed.memory.planning.lifetimes import Costs, Footprint, Lifetimes
    from testbed.memory.planning.plan import MemoryPlan

    Choose = Callable[[Lifetimes, "Limits"], MemoryPlan]
    Prepare = Callable[[torch.nn.Module, torch.optim.Optimizer], None]


To = Literal["shm", "file"]
"""Where a CPU's tensors wait: in shared memory, or in files of the temporary folder."""


@dataclass(frozen=True)
class Release:
    """A gradient is freed when its message has left, and the optimizer steps as means arrive.

    Attributes:
        in_flight: messages whose buffers exist at once.
        poisons: buffers are overwritten when they are given back (see `running.arena`); for tests.
    """

    in_flight: int = 2
    poisons: bool = field(default=False, repr=False)


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
class Limits:
    """What a choice for activations is made under.

    Attributes:
        budget_bytes: largest peak of weights, optimizer state, gradients and activations; None:
            no limit.
        costs: of moving, and what becomes of gradients.
        held_bytes: that exchanging holds beside these, and that `budget_bytes` leaves room for.
        iteration_s: seconds of the whole iteration from what a choice takes; None: only the extra
            time of the step counts.
    """

    budget_bytes: int | None
    costs: Costs
    held_bytes: int = 0
    iteration_s: Callable[[Footprint], float] | None = None


@dataclass(frozen=True)
class Strategy:
    """How a worker saves memory.

    Attributes:
        choose: what becomes of each activation, from the lifetimes of one step, as
            `choose(lifetimes, limits)`; None: all stay.
        release: what becomes of gradients; None: all stay until the optimizer's step.
        mirror: what becomes of what a compressor did not send; None: the compressor keeps it.
        prepare: called once, with what trains, before the first step.
        to: where a CPU's activations wait that are moved.
        state_on_host: the optimizer's state lies in host memory, which `prepare` sees to.
        weak: fields that give way where another strategy of a chain decides about the same.
    """

    choose: Choose | None = None
    release: Release | None = None
    mirror: Mirror | None = None
    prepare: Prepare | None = None
    to: To = "shm"
    state_on_host: bool = False
    weak: tuple[str, ...] = field(default=(), repr=False)

    def with_weak_mirror(self, mirror: Mirror | None) -> Strategy:
        """With another mirror, if the own one gives way."""
        return replace(self, mirror=mirror) if "mirror" in self.weak else self


KEEP_ALL: Final = Strategy()


def combined(strategies: Sequence[tuple[str, Strategy]]) -> Strategy:
    """One strategy from those of a chain, each with its name; all prepare, one after another.

    Raises:
        UsageError: two of them decide about the same; names them.

    Example:
        >>> both = combined([("a", Strategy(release=Release())), ("b", Strategy(mirror=Mirror()))])
        >>> both.release, both.mirror
        (Release(in_flight=2), Mirror(where='device', form='difference'))
    """
    found: dict[str, Any] = {}
    spare: dict[str, Any] = {}
    owners: dict[str, str] = {}
    for name, strategy in strategies:
        for what, about in _ABOUT.items():
            value = getattr(strategy, what)
            if value is None:
                continue
            if what in strategy.weak:
                spare.setdefault(what, value)
                continue
            if what in found:
                raise UsageError(
                    f"memory {owners[what]!r} and {name!r} both decide about {about}; expected "
                    "one of them, and beside it a strategy for something else, as in "
                    "checkpoint+release"
                )
            found[what], owners[what] = value, name
    steps = [strategy.prepare for _, strategy in strategies if strategy.prepare is not None]
    return Strategy(
        **(spare | found),
        prepare=_in_turn(steps) if steps else None,
        to=next((s.to for _, s in strategies if s.choose is not None), KEEP_ALL.to),
        state_on_host=any(strategy.state_on_host for _, strategy in strategies),
    )


_ABOUT = {
    "choose": "activations",
    "release": "gradients",
    "mirror": "what a compressor did not send",
}


def _in_turn(steps: Sequence[Prepare]) -> Prepare:
    if len(steps) == 1:
        return steps[0]

    def prepare(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in steps:
            step(model, optimizer)

    return prepare


def why_no_mirror(compressor: str, feedback: str) -> str | None:
    """Why a compressor has nothing that could be kept as a mirror; None: it has.

    Args:
        compressor: its specification.
        feedback: see `compression.protocol.Claims`.

    Example:
        >>> why_no_mirror("ef:units=update+topk", "update")
    """
    if feedback == "update":
        return None
    reason = (
        "keeps it in units of gradients, which is no difference of weights once the rate changes"
        if feedback == "gradient"
        else "keeps no residual of this kind"
    )
    return (
        f"memory 'mirror' is what error feedback in units of updates did not send, and compressor "
        f"{compressor!r} {reason}; write ef:units=update+NAME, as ef:units=update+topk"
    )
