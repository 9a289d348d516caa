"""The study `laysa`: memory strategies and sparse messages, predicted beside measured."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from testbed.base.axes import MEMORY
from testbed.base.config import RunConfig
from testbed.base.dtypes import ELEMENT_BYTES
from testbed.base.errors import UsageError
from testbed.base.files import to_json, write_atomically
from testbed.base.link import Link
from testbed.base.plan import Plan
from testbed.base.spec import parse_options
from testbed.base.trace import Trace, TraceTensor
from testbed.memory.planning.joint import late_s
from testbed.memory.planning.laysa import DoesNotFit
from testbed.memory.planning.lifetimes import KEEP, Footprint, Lifetimes
from testbed.memory.planning.plan import MemoryPlan, plan_of
from testbed.memory.planning.simulator import simulate
from testbed.memory.strategy import Limits, Strategy
from testbed.prediction.cross_iteration import predict
from testbed.scheduling.protocol import make_plan
from testbed.studies.laysa_claims import claims
from testbed.studies.laysa_table import (
    MIB,
    MODELS,
    MOMENTA,
    ROWS,
    SPARSE,
    START,
    Foreseen,
    Row,
    Together,
    to_markdown,
)
from testbed.sweeping.grid import Sweep
from testbed.sweeping.run import INTERRUPTED, carry_out, process_runner
from testbed.sweeping.study import Measured, Study, read_cells, study_store
from testbed.training.compressed.spec import compression_of
from testbed.training.exchange_needs import Exchanged
from testbed.training.forecast import (
    Batches,
    Forecast,
    forecast,
    jointly,
    largest_batch,
)
from testbed.training.replica import make_replica
from testbed.workloads.load import load_workload

NETWORKS: Final = (1.0, 4.0)  # backward passes that dense messages take, planned jointly
WARMUP: Final = 2  # the last one is measured; an optimizer has its state from the second on


@dataclass(frozen=True)
class Options:
    """Options of the study.

    Attributes:
        models: to be looked at, joined by `+`; empty: all five.
        measure: also run the rows at the smaller batch.
        batch: which batches of a model are run: `small`, `large` or `both`.
        repeats: of each measured row.
        steps: of each measured row, a third of them warm-up, at least two; with fewer than five
            the row is of its peak alone.
    """

    models: str = ""
    measure: bool = True
    batch: Literal["small", "large", "both"] = "small"
    repeats: int = 1
    steps: int = 6

    def __post_init__(self) -> None:
        if self.steps <= WARMUP:
            raise UsageError(f"laysa: steps is {self.steps}; expected more than {WARMUP}")
        unknown = [model for model in self.chosen if model not in MODELS]
        if unknown:
            raise UsageError(f"laysa: no model {unknown[0]!r}; expected {'+'.join(MODELS)}")

    @property
    def chosen(self) -> tuple[str, ...]:
        """The models."""
        return tuple(self.models.split("+")) if self.models else tuple(MODELS)


def configuration(workload: str, row: Row) -> RunConfig:
    """The run that carries a row out on one worker."""
    return RunConfig(
        workload=workload,
        backend="none",
        workers=1,
        compressor=row.compressor,
        memory=row.memory or MEMORY.default,
        momentum=row.momentum,
        batch_size=row.batch_size,
        verify_steps=0,
        measure_memory=True,
    )


def foresee_model(workload: str, batches: Sequence[int]) -> Foreseen:
    """All rows of a model: at each batch size, and the largest that fits."""
    rows: list[Row] = []
    together: list[Together] = []
    fixed_share = 0.0
    for momentum in MOMENTA:
        job = _Job(workload, momentum)
        if momentum == MOMENTA[0]:
            fixed_share = job.fixed_share(batches[0])
        sparse = [job.row(ROWS[1], size) for size in batches]
        for number, size in enumerate(batches):
            if momentum == MOMENTA[0]:
                half_bytes = sparse[number].peak_bytes // 2
                together += [job.together(size, half_bytes, network) for network in NETWORKS]
            for kind in ROWS:
                row = job.row(kind, size, sparse[number].peak_bytes // 2)
                if size == batches[-1] and kind[1]:
                    row = job.with_largest(row, sparse[0].peak_bytes)
                rows.append(row)
    return Foreseen(
        workload=workload, rows=tuple(rows), fixed_share=fixed_share, together=tuple(together)
    )


class _Job:
    """A model with one momentum, recorded once."""

    def __init__(self, workload: str, momentum: float) -> None:
        self.workload, self.momentum = load_workload(workload, seed=1), momentum
        self.base = RunConfig(workload=workload, backend="none", workers=1, momentum=momentum)
        self.recorded = Batches(make_replica(self.workload, self.base, 1))

    def row(self, kind: tuple[str, str, str], size: int, half_bytes: int = 0) -> Row:
        label, memory, compressor = kind
        row = Row(
            label=label, memory="", compressor=compressor, momentum=self.momentum, batch_size=size
        )
        budget = f"budget_mb={half_bytes * 100 // MIB / 100:.2f},workspace=0"
        why = ""
        for spec in [memory] if memory else [f"laysa:{budget}", f"laysa:{budget},mirror=host"]:
            try:
                found = self.forecast(spec, compressor, size)
            except DoesNotFit as error:
                why = str(error)
                continue
            times = found.lifetimes.time_s
            return msgspec.structs.replace(
                row,
                memory=spec,
                peak_bytes=found.peak_bytes,
                step_s=times[-1] if times else 0.0,
                extra_s=found.footprint.extra_s,
                moved_bytes=found.footprint.moved_bytes,
                host_bytes=self.host_bytes(spec),
                why=found.plan.why,
            )
        return msgspec.structs.replace(row, why=why)

    def host_bytes(self, memory: str) -> int:
        """What a strategy keeps on the host between steps: a mirror, the optimizer's state."""
        config = msgspec.structs.replace(self.base, memory=memory, compressor=SPARSE)
        strategy, step = make_replica(self.workload, config, 1).strategy, self.recorded.at(2)
        mirrored = strategy.mirror is not None and strategy.mirror.where == "host"
        kept = sum(gradient.num_bytes for gradient in step.gradients) if mirrored else 0
        return kept + (step.optimizer_bytes if strategy.state_on_host else 0)

    def with_largest(self, row: Row, budget_bytes: int) -> Row:
        """The row with the largest batch that fits: of its plan, or of one made at that size."""
        kind = row.memory, row.compressor
        best, actions = 0, self.forecast(*kind, row.batch_size).plan.actions
        for _ in range(2):
            plan = functools.partial(self.forecast, *kind, actions=actions)
            size = largest_batch(_peak_of(plan), budget_bytes)
            if size is None or size <= best:
                break
            best, found = size, plan(size)
            actions = self.forecast(*kind, size).plan.actions
        if not best:
            return row
        return msgspec.structs.replace(
            row,
            largest_batch=best,
            largest_step_s=found.lifetimes.time_s[-1] + found.footprint.extra_s,
        )

    def fixed_share(self, size: int) -> float:
        """Of a dense step of so many samples: what a step of none would take."""
        step_s = self.recorded.at(size).time_s[-1]
        return max(0.0, 1 - (self.recorded.at(2 * size).time_s[-1] - step_s) / step_s)

    def together(self, size: int, budget_bytes: int, network: float) -> Together:
        """Dense gradients on a network, with memory and messages planned alone and together."""
        found = Together(batch_size=size, network=network, budget_bytes=budget_bytes)
        config = msgspec.structs.replace(self.base, memory="laysa")
        replica = make_replica(self.workload, config, 1)
        lifetimes = self.recorded.at(size)
        given = (lifetimes, replica.strategy, Exchanged.of(replica, None, 2, False), None, 2)
        untouched = simulate(lifetimes, KEEP * len(lifetimes.values))
        priced = _Priced.on(trace_of(lifetimes, untouched), network)
        try:
            alone = forecast(*given, budget_bytes)
            best, schedule = jointly(*given, budget_bytes, priced)
        except DoesNotFit as error:
            return msgspec.structs.replace(found, why=str(error))
        assert schedule is not None
        late = late_s(lifetimes, untouched, alone.footprint)
        return msgspec.structs.replace(
            found,
            alone_s=priced.iteration_s(priced.schedule_for({}), late),
            after_s=priced.iteration_s(priced.schedule_for(late), late),
            jointly_s=priced.iteration_s(schedule, late_s(lifetimes, untouched, best.footprint)),
        )

    def forecast(self, memory: str, compressor: str, size: int, actions: str = "") -> Forecast:
        """The strategy's forecast; with these actions if there are any."""
        config = msgspec.structs.replace(self.base, memory=memory, compressor=compressor)
        replica = make_replica(self.workload, config, 1)
        compression = compression_of(compressor, config.seed)
        strategy = replica.strategy
        if actions and strategy.choose is not None:
            strategy = _fixed(strategy, actions)
        exchanged = Exchanged.of(replica, None, 1, compression is not None)
        return forecast(self.recorded.at(size), strategy, exchanged, compression)


@dataclass(frozen=True)
class _Priced:
    """See `training.protocol.Pricing`."""

    trace: Trace
    link: Link

    @classmethod
    def on(cls, trace: Trace, network: float) -> _Priced:
        link = Link(
            backend="mpi-ring",
            num_workers=2,
            latency_s=START * trace.backward_s,
            seconds_per_byte=network * trace.backward_s / trace.num_bytes,
        )
        return cls(trace, link)

    def schedule_for(self, late_s: Mapping[str, float]) -> Plan:
        """See `Pricing.schedule_for`."""
        return make_plan("mg-wfbp", self.trace.delayed(late_s), self.link)

    def iteration_s(self, plan: Plan, late_s: Mapping[str, float]) -> float:
        """See `Pricing.iteration_s`."""
        return predict(plan, self.trace.delayed(late_s), self.link).iteration_s


def trace_of(lifetimes: Lifetimes, untouched: Footprint) -> Trace:
    """The estimated times of a recorded step as a trace.

    Args:
        lifetimes: of the step.
        untouched: its footprint with all activations kept.
    """
    ready_s, gradients = untouched.ready_s, lifetimes.gradients
    unpacked = [use.unpacked for v in lifetimes.values for use in v.uses if use.unpacked >= 0]
    forward_s = lifetimes.time_s[min(unpacked)]
    tensors = tuple(
        TraceTensor(
            name=gradient.name,
            num_elements=gradient.num_bytes // ELEMENT_BYTES["float32"],
            forward_s=forward_s / len(gradients),
            backward_s=now_s - before_s,
        )
        for gradient, now_s, before_s in zip(
            gradients, ready_s, (forward_s, *ready_s), strict=False
        )
    )
    return Trace(name="recorded", device="cpu", batch_size=1, tensors=tensors[::-1])


def _peak_of(plan: Callable[[int], Forecast]) -> Callable[[int], int | None]:
    return lambda size: plan(size).peak_bytes


def _fixed(strategy: Strategy, actions: str) -> Strategy:
    def choose(lifetimes: Lifetimes, limits: Limits) -> MemoryPlan:
        footprint = simulate(lifetimes, actions, limits.costs)
        return plan_of("fixed", lifetimes, actions, footprint)

    return dataclasses.replace(strategy, choose=choose)


# Carrying it out: forecasts and cells of each model are kept in a folder of their own.


def _foreseen(folder: Path, options: Options) -> list[Foreseen]:
    """Those of all models in the folder, after the chosen ones that lack have been made."""
    for model in options.chosen:
        path = folder / model / "foreseen.json"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, to_json(foresee_model(model, MODELS[model])))
    paths = [folder / model / "foreseen.json" for model in MODELS]
    try:
        return [
            msgspec.json.decode(path.read_bytes(), type=Foreseen) for path in paths if path.exists()
        ]
    except msgspec.ValidationError as error:
        raise UsageError(
            f"{folder} holds forecasts of another version ({error}); remove its foreseen.json files"
        ) from error


def _files(folder: Path, options: Options) -> dict[str, str]:
    models = _foreseen(folder, options)
    cells = [
        cell
        for model in models
        for store in sorted((folder / model.workload).glob("batch-*"))
        for cell in read_cells(store).values()
    ]
    table = to_markdown(models, cells, claims(models, cells))
    return {"laysa.md": table, "laysa.json": to_json(models).decode()}


def _compute(options: Options) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        return _files(Path(folder), options)


def _measure(folder: Path, options: Options) -> Measured:
    status = 0
    for model in _foreseen(folder, options):
        if model.workload not in options.chosen:
            continue
        small, large = MODELS[model.workload]
        for size in {"small": (small,), "large": (large,)}.get(options.batch, (small, large)):
            sweep = _sweep(model, size, options)
            store = study_store(folder / model.workload / f"batch-{size}", sweep)
            with process_runner(store) as runner:
                status = max(status, carry_out(store, runner))
            if status == INTERRUPTED:
                return Measured({}, status)
    return Measured(_files(folder, options), status)


def _sweep(model: Foreseen, batch_size: int, options: Options) -> Sweep:
    cells = [
        msgspec.structs.replace(
            configuration(model.workload, row),
            steps=options.steps,
            warmup=max(WARMUP, options.steps // 3),
        )
        for row in model.rows
        if row.batch_size == batch_size and row.memory
    ]
    name = f"laysa-{model.workload}-{batch_size}"
    return Sweep(name, tuple(cells), repeats=options.repeats)


def _study(options: Options) -> Study:
    return Study(
        name="laysa",
        summary="memory and sparse messages together, predicted and (measure=0: not) measured "
        "(models=a+b, batch=small|large|both, repeats, steps)",
        compute=lambda: _compute(options),
        go_on=lambda folder: _files(folder, options),
        measure=(lambda folder, files: _measure(folder, options)) if options.measure else None,
        with_options=lambda given: _study(parse_options("laysa", given, Options)),
    )


LAYSA = _study(Options())
