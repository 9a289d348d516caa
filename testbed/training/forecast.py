"""What the memory of a step will be, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import torch

from testbed.base.errors import UsageError
from testbed.base.plan import Plan
from testbed.base.units import format_bytes
from testbed.memory.planning.gradients import HELD_BYTES, SLICE_ELEMENTS
from testbed.memory.planning.joint import late_s, plan_jointly
from testbed.memory.planning.laysa import DoesNotFit, laysa
from testbed.memory.planning.lifetimes import (
    KEEP,
    Costs,
    Footprint,
    Lifetimes,
    at_batch,
    overwritten,
)
from testbed.memory.planning.plan import MemoryPlan, plan_of
from testbed.memory.planning.search import IterationCost
from testbed.memory.planning.simulator import simulate
from testbed.memory.recording.record import record
from testbed.memory.running.arena import ArenaPlan
from testbed.memory.strategy import Limits, Mirror, Release, Strategy, why_no_mirror
from testbed.training.compressed.spec import Compression
from testbed.training.exchange.step import is_elementwise
from testbed.training.exchange_needs import Exchanged, compressed
from testbed.training.protocol import Pricing
from testbed.training.replica import Replica

RESERVE_BYTES: Final = 12 << 20
"""Of a budget, for the allocator, the interpreter and PyTorch's own records of a step: measured
under `RLIMIT_DATA`, ResNet-50 at images of 96 pixels needed between 5 and 10 MiB."""
MIB: Final = 1 << 20
MOST_SAMPLES: Final = 1 << 20


@dataclass(frozen=True)
class Forecast:
    """What a step will take.

    Attributes:
        lifetimes: of the step, recorded on fake tensors.
        plan: what becomes of its activations.
        footprint: predicted, of storages alone.
        communication_bytes: that stay all the time: buckets, residuals.
        costs: that it was made with.
        workspace_bytes: how much higher the peak is with what operators hold while they run; 0
            where it was not measured.
        arena: where released buckets lie; None: there are none.
    """

    lifetimes: Lifetimes
    plan: MemoryPlan
    footprint: Footprint
    communication_bytes: int
    costs: Costs
    workspace_bytes: int = 0
    arena: ArenaPlan | None = None

    @property
    def peak_bytes(self) -> int:
        """All storages together, at the moment at which they are most."""
        return self.footprint.peak_bytes + self.communication_bytes

    @property
    def needed_bytes(self) -> int:
        """The peak with what operators hold while they run."""
        return self.peak_bytes + self.workspace_bytes

    def fits(self, budget_bytes: int | None) -> bool:
        """Whether a budget has room for it, and for what else a process takes meanwhile."""
        return budget_bytes is None or self.needed_bytes + RESERVE_BYTES <= budget_bytes

    @property
    def by_category(self) -> dict[str, int]:
        """The peak by what it is for, in the tracker's words."""
        found = self.footprint
        return {
            "weights": self.lifetimes.weight_bytes,
            "optimizer": self.lifetimes.optimizer_bytes,
            "gradients": found.gradient_bytes,
            "activations": found.activation_bytes,
            "temporary": found.temporary_bytes,
            "communication": self.communication_bytes + found.exchange_bytes,
        }

    @property
    def layer(self) -> str:
        """At work when most is alive."""
        return self.lifetimes.layers[self.footprint.position]

    @property
    def floor_bytes(self) -> int:
        """Weights, optimizer state and the largest layer's working set: no plan takes less."""
        step = self.lifetimes
        sizes = [value.num_bytes for value in step.values]
        working: dict[int, int] = {}
        for value in step.values:
            read = sum(sizes[source] for source in value.inputs if source != value.replaces)
            made = 0 if value.replaces is not None else value.num_bytes
            working[value.op] = max(working.get(value.op, 0), read + made)
        largest = max([*working.values(), *step.base], default=0)
        return step.weight_bytes + step.optimizer_bytes + largest


def record_step(replica: Replica, batch_size: int, *, calibrated: bool = False) -> Lifetimes:
    """The lifetimes of a step of a freshly made replica, which is left as it is.

    Args:
        replica: that trains.
        batch_size: samples of a micro-batch.
        calibrated: measure operators (see `memory.recording.record.record`).
    """
    workload = replica.workload
    indices = np.arange(batch_size, dtype=np.int64) % len(workload.train)
    batch = replica.to_device(workload.train.batch(indices))

    def loss(model: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
        assert workload.loss is not None
        with replica.autocast():
            return workload.loss(model, given)

    was_training = replica.model.training
    replica.model.train()
    try:
        step = record(replica.model, loss, batch, replica.optimizer, calibrated=calibrated)
    finally:
        replica.model.train(was_training)
    step = msgspec.structs.replace(step, accumulates=replica.accumulates)
    if not is_elementwise(replica.optimizer):
        return step
    element_bytes = next(replica.model.parameters()).element_size()
    return msgspec.structs.replace(step, update_slice_bytes=SLICE_ELEMENTS * element_bytes)


def forecast(
    lifetimes: Lifetimes,
    strategy: Strategy,
    exchanged: Exchanged,
    compression: Compression | None = None,
    num_workers: int = 1,
    budget_bytes: int | None = None,
    costs: Costs | None = None,
    iteration_s: IterationCost | None = None,
) -> Forecast:
    """What a recorded step takes under a strategy, and its memory plan.

    Args:
        lifetimes: of the step.
        strategy: how memory is saved.
        exchanged: what exchanging holds.
        compression: of its messages.
        num_workers: that exchange.
        budget_bytes: that a plan is to fit, everything included; None: no limit.
        costs: of moving.
        iteration_s: seconds of the whole iteration; None: only the step's extra time counts.

    Raises:
        UsageError: the strategy finds no plan that fits; tells the smallest budget that would do.
    """
    communication_bytes = exchanged.held_bytes
    costs = msgspec.structs.replace(
        costs or Costs(),
        in_flight=exchanged.in_flight,
        held_bytes=0 if exchanged.travels else HELD_BYTES,
    )
    if compression is not None:
        kept_bytes, costs = compressed(
            lifetimes, strategy.mirror, exchanged, compression, num_workers, costs
        )
        communication_bytes += kept_bytes
        if strategy.mirror is not None:  # counted with the exchange
            lifetimes = msgspec.structs.replace(lifetimes, update_share=0.0)
    if strategy.state_on_host:
        lifetimes = msgspec.structs.replace(lifetimes, optimizer_bytes=0)
    held_bytes = communication_bytes + RESERVE_BYTES
    limit = None if budget_bytes is None else budget_bytes - held_bytes
    everything = msgspec.structs.replace(costs, with_workspace=True)
    try:
        plan = chosen(strategy, lifetimes, Limits(limit, everything, held_bytes, iteration_s))
    except DoesNotFit as error:  # told of the whole, not of what is left for the plan
        raise error.beside(held_bytes) from error
    lifetimes = overwritten(lifetimes, plan.in_place)
    footprint = simulate(lifetimes, plan.actions, costs)
    with_all = simulate(lifetimes, plan.actions, everything)
    workspace_bytes = with_all.peak_bytes - footprint.peak_bytes
    return Forecast(
        *(lifetimes, plan, footprint, communication_bytes, costs, workspace_bytes, exchanged.arena)
    )


def jointly(
    lifetimes: Lifetimes,
    strategy: Strategy,
    exchanged: Exchanged,
    compression: Compression | None,
    num_workers: int,
    budget_bytes: int | None,
    pricing: Pricing | None,
    costs: Costs | None = None,
) -> tuple[Forecast, Plan | None]:
    """The forecast, and a schedule that is planned for it where there are times to plan from.

    Args:
        lifetimes: see `forecast`, as are the others.
        strategy: how memory is saved.
        exchanged: what exchanging holds.
        compression: of its messages.
        num_workers: that exchange.
        budget_bytes: that a plan is to fit.
        pricing: plans and predicts the exchange; None: only the step's extra time counts.
        costs: of moving.

    Raises:
        UsageError: see `forecast`.
    """

    def alone(cost: IterationCost | None) -> Forecast:
        return forecast(
            *(lifetimes, strategy, exchanged, compression, num_workers, budget_bytes, costs),
            iteration_s=cost,
        )

    if pricing is None or strategy.choose is None:
        return alone(None), None
    untouched = simulate(lifetimes, KEEP * len(lifetimes.values))
    made: dict[str, Forecast] = {}

    def choose(cost: IterationCost | None) -> MemoryPlan:
        found = alone(cost)
        made[found.plan.digest()] = found
        return found.plan

    def late(footprint: Footprint) -> dict[str, float]:
        return late_s(lifetimes, untouched, footprint)

    best = plan_jointly(
        choose,
        lambda plan: made[plan.digest()].footprint,
        lambda footprint: pricing.schedule_for(late(footprint)),
        lambda schedule, footprint: pricing.iteration_s(schedule, late(footprint)),
        untouched,
    )
    return made[best.plan.digest()], best.schedule


class Batches:
    """The lifetimes of a replica's step at any batch size, from recordings of two small ones.

    A third one tells whether sizes grow by a line, which they do not where samples meet one another
    (as in a contrastive loss); then each size is recorded.

    Args:
        replica: freshly made.
        calibrated: see `record_step`.
    """

    def __init__(self, replica: Replica, *, calibrated: bool = False) -> None:
        self._replica, self._calibrated = replica, calibrated
        self._recorded = {n: record_step(replica, n, calibrated=calibrated) for n in (2, 4)}
        self._is_linear: bool | None = None

    def at(self, batch_size: int) -> Lifetimes:
        """Of a step with so many samples."""
        found = self._recorded.get(batch_size)
        if found is None and self._grows_by_a_line():
            found = self._drawn_to(batch_size)
        if found is None:
            return record_step(self._replica, batch_size, calibrated=self._calibrated)
        return found

    def _drawn_to(self, batch_size: int) -> Lifetimes | None:
        return at_batch(self._recorded[2], self._recorded[4], 2, 4, batch_size)

    def _grows_by_a_line(self) -> bool:
        if self._is_linear is None:
            drawn, real = self._drawn_to(16), record_step(self._replica, 16)
            ours, theirs = (
                [] if each is None else [*(v.num_bytes for v in each.values), *each.base]
                for each in (drawn, real)
            )
            alike = len(ours) == len(theirs)
            self._is_linear = alike and np.allclose(ours, theirs, rtol=0.01, atol=64)
        return self._is_linear


def largest_batch(peak_bytes: Callable[[int], int | None], budget_bytes: int) -> int | None:
    """The largest batch size whose peak fits; None: not even one sample does.

    Args:
        peak_bytes: of a batch size, growing with it; None: nothing fits.
        budget_bytes: that is to be fitted.

    Example:
        >>> largest_batch(lambda size: 100 * size, 1050)
        10
    """

    def fits(size: int) -> bool:
        peak = peak_bytes(size)
        return peak is not None and peak <= budget_bytes

    if not fits(1):
        return None
    low = 1
    while low < MOST_SAMPLES and fits(2 * low):
        low *= 2
    high = 2 * low if low < MOST_SAMPLES else low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def chosen(strategy: Strategy, lifetimes: Lifetimes, limits: Limits) -> MemoryPlan:
    """The strategy's plan; everything stays where it has none."""
    if strategy.choose is not None:
        return strategy.choose(lifetimes, limits)
    actions = KEEP * len(lifetimes.values)
    footprint = simulate(lifetimes, actions, limits.costs)
    return plan_of("none", lifetimes, actions, footprint, why="all activations stay")


def least_strategy(compression: Compression | None) -> Strategy:
    """What takes least beside a compressor: activations planned, gradients released, a mirror.

    Args:
        compression: of the run; None: nothing compresses.
    """

    def choose(lifetimes: Lifetimes, limits: Limits) -> MemoryPlan:
        return laysa(lifetimes, limits.costs, limits.budget_bytes)

    mirror = None
    if compression is not None:
        feedback = compression.compressor.claims.feedback
        mirror = Mirror() if why_no_mirror(compression.text, feedback) is None else None
    return Strategy(choose=choose, release=Release(), mirror=mirror)


def refuse_excess(found: Forecast, budget_bytes: int | None, least: Callable[[], Forecast]) -> None:
    """Raise UsageError where a run would not fit its budget; tell what would.

    Args:
        found: of the run.
        budget_bytes: largest peak; None: no limit.
        least: the forecast of the same run with `least_strategy`.
    """
    if found.fits(budget_bytes) or budget_bytes is None:
        return
    other = least().needed_bytes
    how = ", with --memory laysa" if other < found.needed_bytes else ""
    smallest_mb = math.ceil((min(other, found.needed_bytes) + RESERVE_BYTES) / MIB)
    raise UsageError(
        f"a step would take {format_bytes(found.needed_bytes + RESERVE_BYTES)} at its peak (in "
        f"{found.layer}), and the budget is {format_bytes(budget_bytes)}; the smallest budget that "
        f"would do is {smallest_mb} MiB{how}; give that, or a smaller --batch-size"
    )
