"""What the memory of runs will be: `testbed simulate --memory`, and the largest batch of a run."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Final

import msgspec
import torch

from testbed.base.config import RunConfig
from testbed.base.errors import UsageError
from testbed.memory.planning.laysa import DoesNotFit
from testbed.memory.planning.simulator import Simulator
from testbed.records.memory import MemoryCurve, MemoryForecast
from testbed.training.compressed.spec import compression_of, without_own_momentum
from testbed.training.exchange_needs import Exchanged
from testbed.training.forecast import (
    RESERVE_BYTES,
    Batches,
    Forecast,
    forecast,
    largest_batch,
)
from testbed.training.replica import Replica, make_replica
from testbed.workloads.load import load_workload
from testbed.workloads.workload import Workload

MIB: Final = 2**20
SURE_SHARE: Final = 0.97  # what operators hold differs a little from one measurement to the next


def foresee_all(
    configs: Sequence[RunConfig],
    batches: Sequence[int],
    budget_bytes: int | None,
    *,
    max_batch: bool,
    curves: bool = False,
    plans: bool = False,
) -> list[MemoryForecast]:
    """What steps of a workload would take; not even its weights are allocated.

    They are where its code wants values of weights, or has tensors that are no module's.

    Args:
        configs: of runs that differ in compressor and memory strategy alone.
        batches: samples of a micro-batch; empty: the workload's own.
        budget_bytes: that a step is to fit; None: no limit.
        max_batch: look for the largest batch that fits instead.
        curves: keep the bytes at every event of the step, too.
        plans: keep what becomes of each activation, too.

    Raises:
        UsageError: the workload computes nothing.
    """
    found: list[MemoryForecast] = []
    recorded: dict[str, Batches] = {}  # an optimizer has no state where a compressor does its part
    for config in configs:
        replica, step = _without_values(config, recorded.get(config.compressor))
        recorded[config.compressor] = step
        asked = Asked(config, replica, step, budget_bytes)
        sizes: Sequence[int] = batches or [config.batch_size or replica.workload.batch_size]
        if max_batch and budget_bytes is not None:
            largest = largest_batch(asked.peak_bytes, budget_bytes)
            sizes = [] if largest is None else [largest]
            if largest is None:
                found.append(
                    MemoryForecast(
                        memory=config.memory,
                        compressor=config.compressor,
                        fits=False,
                        error=asked.why_not_one(),
                    )
                )
        found += [asked.described(size, curves=curves, plans=plans) for size in sizes]
    return found


def _without_values(config: RunConfig, known: Batches | None) -> tuple[Replica, Batches]:
    """A replica whose weights have no values, if that can be, and the lifetimes of its steps.

    Args:
        config: of a run.
        known: lifetimes; None: they are recorded.
    """

    def built(device: torch.device) -> tuple[Replica, Batches]:
        with device:
            workload = load_workload(config.workload, seed=config.seed, data_dir=config.data)
        if workload.recorded is not None:
            raise UsageError(
                f"workload {config.workload!r} is a replay, whose tensors are made up; expected a "
                "workload that computes, as resnet50"
            )
        replica = make_replica(workload, without_own_momentum(config), 1)
        return replica, known or Batches(replica)

    try:
        return built(torch.device("meta"))
    except UsageError:
        raise
    except Exception:  # of code that wants values; any other error is raised here again
        return built(torch.device("cpu"))


class Asked:
    """A run whose memory is asked for, at any batch size.

    Args:
        config: of the run.
        replica: made from it.
        recorded: lifetimes of its steps.
        budget_bytes: that a step is to fit; None: no limit.
    """

    def __init__(
        self, config: RunConfig, replica: Replica, recorded: Batches, budget_bytes: int | None
    ) -> None:
        self._config, self._replica = config, replica
        self._recorded, self._budget_bytes = recorded, budget_bytes
        self._compression = compression_of(config.compressor, config.seed)
        compressed = self._compression is not None
        self._exchanged = Exchanged.of(replica, None, config.workers, compressed)

    def at(self, batch_size: int) -> Forecast:
        """The forecast; see `forecast`, what it raises too."""
        return forecast(
            self._recorded.at(batch_size),
            self._replica.strategy,
            self._exchanged,
            self._compression,
            self._config.workers,
            self._budget_bytes,
        )

    def peak_bytes(self, batch_size: int) -> int | None:
        """The peak; None: no plan fits."""
        try:
            return self.at(batch_size).needed_bytes + RESERVE_BYTES
        except DoesNotFit:
            return None

    def why_not_one(self) -> str:
        """What one sample takes, where not even one fits."""
        try:
            needed = self.at(1).needed_bytes + RESERVE_BYTES
        except DoesNotFit as error:
            return f"not even one sample fits: {error}"
        return (
            f"not even one sample fits the budget; with one, a step takes {-(-needed // MIB)} MiB, "
            f"{RESERVE_BYTES // MIB} of them beside storages"
        )

    def described(
        self, batch_size: int, *, curves: bool = False, plans: bool = False
    ) -> MemoryForecast:
        """The forecast as a record, with bytes at every event and the plan if asked for."""
        memory, compressor = self._config.memory, self._config.compressor
        budget_bytes = self._budget_bytes
        try:
            found = self.at(batch_size)
        except DoesNotFit as error:
            return MemoryForecast(
                memory=memory,
                compressor=compressor,
                batch_size=batch_size,
                fits=False,
                error=str(error),
            )
        times = found.lifetimes.time_s
        return MemoryForecast(
            memory=memory,
            compressor=compressor,
            batch_size=batch_size,
            peak=found.by_category,
            layer=found.layer,
            floor_bytes=found.floor_bytes,
            step_s=times[-1] if times else 0.0,
            extra_s=found.footprint.extra_s,
            moved_bytes=found.footprint.moved_bytes,
            fits=None if budget_bytes is None else found.fits(budget_bytes),
            why=found.plan.why,
            curve=_curve(found) if curves else None,
            plan=msgspec.Raw(msgspec.json.encode(found.plan)) if plans else None,
        )


def _curve(found: Forecast) -> MemoryCurve:
    times, levels = Simulator(found.lifetimes, found.costs).curve(found.plan.actions)
    levels["communication"] = [size + found.communication_bytes for size in levels["communication"]]
    return MemoryCurve(time_s=times, levels=levels)


def batch_that_fits(config: RunConfig, workload: Workload) -> int:
    """The largest batch size of a run whose step fits its budget.

    Args:
        config: of the run, with a budget.
        workload: freshly built; it is not changed.

    Raises:
        UsageError: there is no budget, or not even one sample fits.
    """
    if config.budget_mb is None:
        raise UsageError("--max-batch was given without --budget-mb; expected both")
    budget_bytes = round(config.budget_mb * MIB)
    replica = make_replica(copy.deepcopy(workload), config, 1)
    asked = Asked(config, replica, Batches(replica, calibrated=True), budget_bytes)
    found = largest_batch(asked.peak_bytes, round(budget_bytes * SURE_SHARE))
    if found is None:
        raise UsageError(
            f"not even one sample of {config.workload} fits --budget-mb {config.budget_mb:g} with "
            f"--memory {config.memory}; give a larger budget or another strategy (laysa takes "
            "least)"
        )
    return min(found, len(workload.train))
