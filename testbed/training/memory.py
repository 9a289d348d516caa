"""The memory of a run: planned, carried out, and measured in one of its steps."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Self

import msgspec

from testbed.base.axes import MEMORY
from testbed.base.config import RunConfig
from testbed.base.errors import UsageError
from testbed.base.plan import Plan
from testbed.base.types import Op
from testbed.control.protocol import decided_by_first
from testbed.memory.planning.plan import MemoryPlan
from testbed.memory.recording.calibrate import give_back_pages, moving_costs
from testbed.memory.recording.tracker import (
    ResidentPeak,
    Tracker,
    allocated_from_c,
    anonymous_bytes,
)
from testbed.memory.running.engine import ActivationEngine
from testbed.memory.running.script import let_overwrite
from testbed.records.cell import MemoryResult
from testbed.training.compressed.spec import Compression
from testbed.training.exchange_needs import Exchanged
from testbed.training.forecast import (
    Forecast,
    forecast,
    jointly,
    least_strategy,
    record_step,
    refuse_excess,
)
from testbed.training.protocol import Run, TrainingSession
from testbed.training.replica import Replica

MIB: Final = 2**20
PLAN_S: Final = 1800.0  # rank 0 measures operators and searches


@dataclass
class Foreseen:
    """The memory of a run, on its way from the forecast to the record.

    Attributes:
        forecast: of a step, on rank 0; None: nothing was foreseen.
        budget_bytes: that a step was to fit; None: no limit.
        engine: carries out the plan.
        schedule: planned for the memory plan; None: as it was.
    """

    forecast: Forecast | None = None
    budget_bytes: int | None = None
    engine: ActivationEngine | None = None
    schedule: Plan | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.engine is not None:
            self.engine.close()

    def result(self, watch: MemoryWatch) -> MemoryResult | None:
        """The record."""
        if self.forecast is None:
            return None
        found, tracker = self.forecast, watch.tracker
        return MemoryResult(
            predicted=found.by_category,
            measured={} if tracker is None else tracker.peak,
            layer=found.layer,
            floor_bytes=found.floor_bytes,
            moved_bytes=found.footprint.moved_bytes,
            extra_s=found.footprint.extra_s,
            resident_bytes=watch.resident_bytes,
            kept_bytes=watch.kept_bytes,
            predicted_resident_bytes=found.needed_bytes,
            arena_bytes=0 if found.arena is None else found.arena.num_bytes,
            arena_fragmentation=0.0 if found.arena is None else found.arena.fragmentation,
            plan=found.plan.digest(),
            why="; ".join(filter(None, (found.plan.why, _estimated(found)))),
            budget_bytes=self.budget_bytes,
        )


def _estimated(found: Forecast) -> str:
    """Which operators' times and workspaces are estimates, in words."""
    names = found.lifetimes.estimated
    if not names:
        return ""
    return (
        f"times of {len(names)} operators are estimated from their sizes, as they do not run with "
        f"made-up values: {', '.join(names)}"
    )


def plan_memory(
    run: Run, replica: Replica, compression: Compression | None, batch_size: int
) -> Foreseen:
    """The forecast of a run that wants one, and the engine that carries its plan out.

    Rank 0 decides, and all carry out the same.

    Args:
        run: the rank's place in the job.
        replica: freshly made.
        compression: of the run.
        batch_size: samples of one micro-batch.

    Raises:
        UsageError: the run would not fit its budget, or is a replay without activations.
    """
    config, budget = run.config, run.config.budget_mb
    if not wants_memory(config):
        return Foreseen()
    if replica.workload.recorded is not None:
        if budget is not None or replica.strategy.choose is not None:
            raise UsageError(
                f"workload {config.workload!r} is a replay, whose tensors are made up, so that "
                f"--memory {config.memory} and --budget-mb have no activations to plan for; "
                "expected a workload that computes, or a strategy for gradients alone, as release"
            )
        return Foreseen()
    exchanges = run.backend.capabilities.exchanges
    workers = run.backend.size if exchanges else 1
    budget_bytes = None if budget is None else round(budget * MIB)
    run.control.state = "planning its memory"
    found: Forecast | None = None

    def decide() -> bytes:
        nonlocal found
        exchanged = Exchanged.of(replica, run.plan, workers, compression is not None)

        def least() -> Forecast:
            other = dataclasses.replace(replica, strategy=least_strategy(compression))
            given = Exchanged.of(other, run.plan, workers, compression is not None)
            return forecast(lifetimes, other.strategy, given, compression, workers, costs=costs)

        lifetimes = record_step(replica, batch_size, calibrated=True)
        if Op.APPLY in run.backend.capabilities.ops:  # servers hold the optimizer
            lifetimes = msgspec.structs.replace(
                lifetimes, optimizer_bytes=0, update_bytes=0, update_share=0.0
            )
        costs = moving_costs(replica.device)
        found, schedule = jointly(
            lifetimes,
            replica.strategy,
            exchanged,
            compression,
            workers,
            budget_bytes,
            run.pricing,
            costs,
        )
        refuse_excess(found, budget_bytes, least)
        return msgspec.json.encode((found.plan, schedule))

    shared = decided_by_first(run.control, "memory plan", decide, PLAN_S, run.backend.size)
    plan, schedule = msgspec.json.decode(shared, type=tuple[MemoryPlan, Plan | None])
    let_overwrite(replica.model, plan.in_place)
    engine = ActivationEngine(plan, replica.strategy.to)
    replica.activations = engine
    return Foreseen(found, budget_bytes, engine, schedule)


def wants_memory(config: RunConfig) -> bool:
    """Whether a run's memory is foreseen and measured."""
    asked = config.measure_memory or config.budget_mb is not None
    return asked or not MEMORY.is_default(config)


class MemoryWatch:
    """Measures one step of the warm-up.

    Args:
        replica: that is trained.
        session: that exchanges.
        step: number of the step, from 1; None: nothing is measured.

    Attributes:
        tracker: of the step, once it has begun.
        resident_bytes: largest anonymous resident set of the step, less what the process held
            before training beside its weights; None: not measured.
        kept_bytes: of these, what the allocator had not handed out: pages of freed storages, which
            stay where `settle_allocator` says so, or lie between others; None: not known.
    """

    def __init__(self, replica: Replica, session: TrainingSession, step: int | None) -> None:
        self.tracker: Tracker | None = None
        self.resident_bytes: int | None = None
        self.kept_bytes: int | None = None
        self._replica, self._session, self._step = replica, session, step
        measured = step is not None
        if measured:
            give_back_pages()  # else the step's memory hides in what planning has freed
        self._before_bytes = anonymous_bytes() if measured else None
        self._before_allocated_bytes = allocated_from_c() if measured else None
        kept = [t.untyped_storage() for t in replica.model.state_dict().values()]
        self._weight_bytes = sum({s._cdata: s.nbytes() for s in kept}.values())  # tied ones once

    @contextlib.contextmanager
    def around(self, done: int) -> Iterator[None]:
        """Around the step after which so many are done."""
        if done != self._step:
            yield
            return
        held = self._session.held_tensors()
        self.tracker = Tracker(self._replica.model, self._replica.optimizer, held)
        self._session.watch_threads(self.tracker.elsewhere)
        with ResidentPeak() as resident, self.tracker:
            yield
        self._session.watch_threads(contextlib.nullcontext)
        if self._before_bytes is not None and resident.peak_bytes is not None:
            grown_bytes = resident.peak_bytes - self._before_bytes
            self.resident_bytes = grown_bytes + self._weight_bytes
            before, then = self._before_allocated_bytes, resident.allocated_bytes
            if before is not None and then is not None:
                self.kept_bytes = max(0, grown_bytes - (then - before))
