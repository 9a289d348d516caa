"""Strategies that choose for each layer: LaySA, and the cheapest that fits."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from testbed.base.errors import UsageError
from testbed.base.files import read_file
from testbed.base.parts import OURS, RECONSTRUCTION, Part
from testbed.base.units import format_bytes, format_seconds
from testbed.memory.checkpoint import by_cost, in_segments
from testbed.memory.inplace import may_overwrite
from testbed.memory.mirror import state_on_host
from testbed.memory.offload import OffloadOptions, of_size
from testbed.memory.planning.laysa import DoesNotFit, laysa
from testbed.memory.planning.lifetimes import KEEP, Costs, Lifetimes, overwritten
from testbed.memory.planning.plan import MemoryPlan, decode_memory_plan, plan_of, values_of
from testbed.memory.planning.simulator import simulate
from testbed.memory.release import refuses_release
from testbed.memory.strategy import Limits, Mirror, Release, Strategy

if TYPE_CHECKING:
    from testbed.memory.strategy import Choose

MIB: Final = 2**20


@dataclass(frozen=True)
class LaysaOptions:
    """Options of `laysa` and `auto`.

    Attributes:
        budget_mb: MiB that a step may take, communication included; None: that of the run, and
            without one the least peak is wanted.
        in_flight: messages on their way at once.
        mirror: where what was not sent is kept: on the `device`, on the `host` (with the
            optimizer's state), or by the compressor (`none`).
        workspace: what operators hold while they run, beside storages, counts for the peak (a run
            measures it); without it the plan is for storages alone.
        plan: file with a saved plan (`simulate --memory --plan-out`), which is carried out instead
            of choosing one; `laysa` alone.
    """

    budget_mb: float | None = None
    in_flight: int = 2
    mirror: Literal["device", "host", "none"] = "device"
    workspace: bool = True
    plan: str = ""

    def __post_init__(self) -> None:
        if self.budget_mb is not None and not 0 < self.budget_mb < inf:
            raise UsageError(
                f"laysa: budget_mb is {self.budget_mb}; expected a finite number above 0"
            )
        if self.in_flight < 1:
            raise UsageError(f"laysa: in_flight is {self.in_flight}; expected 1 or more")


def layer_centric(options: LaysaOptions) -> Strategy:
    """Plan each layer: keep, recompute or offload; release its gradient; keep a mirror.

        peak = max_t [activations(t) + what layers in flight exchange] + weights + mirror

    Memory reuse wants gradients gone, sparse communication wants what was not sent to stay, and
    its velocities, residuals, scratch and payloads balloon. Handled layer by layer, what
    exchanging needs exists for `in_flight` layers at once instead of all of them (`release`, with
    its arena), what was not sent joins the mirror (`mirror`, where the compressor is error
    feedback in units of updates), and the activations of each layer are kept, recomputed or
    offloaded, whichever costs the whole iteration least (`memory.planning.laysa`).

    Args:
        options: budget in MiB, messages in flight, where the mirror lies, a saved plan.

    Raises:
        UsageError: no plan fits the budget (tells the smallest that would do), or the saved one
            does not or is another step's.

    Example:
        >>> strategy = layer_centric(LaysaOptions(mirror="host"))
        >>> strategy.release, strategy.mirror
        (Release(in_flight=2), Mirror(where='host', form='difference'))

    Reference:
        Zhao, Liu, Wang and Feng, 2021, IEEE Access 9 (LaySA). Departs: a reconstruction from the
        abstract; what is pooled, what is moved and how it is chosen are ours.
    """
    saved = decode_memory_plan(read_file(options.plan), options.plan) if options.plan else None

    def choose(lifetimes: Lifetimes, limits: Limits) -> MemoryPlan:
        costs, budget = _costs(options, limits), _budget(options, limits)
        if saved is not None:
            return _again(saved, options.plan, lifetimes, costs, budget)
        return laysa(lifetimes, costs, budget, limits.iteration_s)

    return _with_exchange(options, choose)


def cheapest(options: LaysaOptions) -> Strategy:
    """Take `none` if it fits the budget, else the cheapest plan that does.

        min extra time over {none, checkpoint, offload, laysa} so that peak <= budget

    Gradients are released and a mirror is kept as under `laysa`; both cost next to nothing.

    Args:
        options: see `LaysaOptions` (budget in MiB); without any budget all activations stay.

    Raises:
        UsageError: nothing fits; tells the smallest budget that would do.

    Example:
        >>> cheapest(LaysaOptions()).release
        Release(in_flight=2)

    Reference:
        Zhao, Liu, Wang and Feng, 2021, IEEE Access 9 (LaySA), which compares such strategies.
        Departs: the choice among them is ours, nothing of it is published.
    """
    if options.plan:
        raise UsageError("auto chooses and takes no saved plan; write laysa:plan=FILE")

    def choose(lifetimes: Lifetimes, limits: Limits) -> MemoryPlan:
        budget, costs = _budget(options, limits), _costs(options, limits)
        all_kept = KEEP * len(lifetimes.values)
        kept = simulate(lifetimes, all_kept, costs)
        if budget is None or kept.peak_bytes <= budget:
            limit = "there is no budget" if budget is None else f"budget {format_bytes(budget)}"
            why = f"none: all activations stay; peak {format_bytes(kept.peak_bytes)}, {limit}"
            return plan_of("none", lifetimes, all_kept, kept, why=why)
        plans = [
            plan_of(label, lifetimes, actions, simulate(lifetimes, actions, costs))
            for label, actions in _published(lifetimes).items()
        ]
        try:
            plans.append(laysa(lifetimes, costs, budget, limits.iteration_s))
        except DoesNotFit as error:
            if all(plan.peak_bytes > budget for plan in plans):
                raise
            plans.append(error.plan)
        fitting = [plan for plan in plans if plan.peak_bytes <= budget]
        best = min(fitting, key=lambda plan: _cost_s(lifetimes, plan, limits))
        told = [f"none takes {format_bytes(kept.peak_bytes)}"] + [
            f"{plan.strategy} {format_bytes(plan.peak_bytes)} and {format_seconds(plan.extra_s)}"
            for plan in plans
        ]
        why = f"{best.strategy}: {best.why or 'the cheapest that fits'}; {', '.join(told)}"
        return msgspec.structs.replace(best, why=why)

    return _with_exchange(options, choose)


def _again(
    saved: MemoryPlan, path: str, lifetimes: Lifetimes, costs: Costs, budget_bytes: int | None
) -> MemoryPlan:
    """The saved plan for this step; its peak and time are simulated anew."""
    if saved.values != (here := values_of(lifetimes)):
        apart = [pair for pair in zip(saved.values, here, strict=False) if pair[0] != pair[1]]
        first = "" if not apart else f", at first {apart[0][0]} for {apart[0][1]}"
        raise UsageError(
            f"{path}: its {len(saved.values)} values are not the {len(here)} of this step{first}; "
            "expected a plan for the same model, batch size and precision; make it again with "
            "testbed simulate --memory laysa --plan-out FILE"
        )
    if wrong := set(saved.in_place) - set(may_overwrite(lifetimes)):
        raise UsageError(f"{path}: {', '.join(sorted(wrong))} may not overwrite what it reads here")
    footprint = simulate(overwritten(lifetimes, saved.in_place), saved.actions, costs)
    why = f"as saved in {path}: {saved.why}"
    given = (saved.strategy, lifetimes, saved.actions, footprint, saved.units)
    plan = msgspec.structs.replace(plan_of(*given, gap=saved.gap, why=why), in_place=saved.in_place)
    if budget_bytes is not None and footprint.peak_bytes > budget_bytes:
        why = f"by the plan in {path}; without plan= one is chosen"
        raise DoesNotFit(budget_bytes, msgspec.structs.replace(plan, why=why))
    return plan


def _published(lifetimes: Lifetimes) -> dict[str, str]:
    root = max(1, round(len(lifetimes.units) ** 0.5))
    return {
        "checkpoint:segments=sqrt": in_segments(lifetimes, root),
        "checkpoint:segments=cost": by_cost(lifetimes),
        "offload": of_size(lifetimes, OffloadOptions().min_kib * 1024),
    }


def _cost_s(lifetimes: Lifetimes, plan: MemoryPlan, limits: Limits) -> float:
    if limits.iteration_s is None:
        return plan.extra_s
    return limits.iteration_s(simulate(lifetimes, plan.actions, limits.costs))


def _budget(options: LaysaOptions, limits: Limits) -> int | None:
    if options.budget_mb is None:
        return limits.budget_bytes
    own = round(options.budget_mb * MIB) - limits.held_bytes
    return own if limits.budget_bytes is None else min(own, limits.budget_bytes)


def _costs(options: LaysaOptions, limits: Limits) -> Costs:
    if options.workspace:
        return limits.costs
    return msgspec.structs.replace(limits.costs, with_workspace=False)


def _with_exchange(options: LaysaOptions, choose: Choose) -> Strategy:
    mirror = None if options.mirror == "none" else Mirror(where=options.mirror)
    return Strategy(
        choose=choose,
        prepare=state_on_host if options.mirror == "host" else None,
        state_on_host=options.mirror == "host",
        release=Release(in_flight=options.in_flight),
        mirror=mirror,
        weak=("release", "mirror"),
    )


LAYSA = Part(
    name="laysa",
    summary="each layer planned: keep, recompute or offload; release; mirror (budget_mb, ...)",
    origin=RECONSTRUCTION,
    build=layer_centric,
    options=LaysaOptions,
    refuses=refuses_release,
)
AUTO = Part(
    name="auto",
    summary="none if it fits the budget, else the cheapest plan that does (budget_mb, ...)",
    origin=OURS,
    build=cheapest,
    options=LaysaOptions,
    refuses=refuses_release,
)
