"""`testbed.report/1`: the cells of one or more sweeps, repeats put together, ready for a table."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from testbed.base.files import to_json
from testbed.prediction.break_even import Pays
from testbed.records.answer import Answer
from testbed.records.cell import Cell

REPORT_SCHEMA: Final = "testbed.report/1"

# Long lists and dictionaries that a table does not show; `--full` keeps them.
BULK = ("samples", "accuracy_curve", "environment")


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """What a cell occupied, and what it made of it.

    Attributes:
        machines: distinct hosts, those of dedicated servers included.
        cores: threads for tensors of all workers, and one for each server.
        links: network links, one a machine; 0 on one machine.
        samples_per_s_per_machine: of all workers together, over the machines.
        samples_per_s_per_core: likewise over the cores.
        samples_per_s_per_link: likewise over the links; null on one machine.
        busiest_link: whose link carries most; empty where no rank has a machine of its own.
        busiest_link_bytes_per_step: what it carries in the larger direction; null: likewise.
        samples_per_busiest_gb: samples trained for each 10^9 bytes of that; null: likewise.
    """

    machines: int
    cores: int
    links: int
    samples_per_s_per_machine: float
    samples_per_s_per_core: float
    samples_per_s_per_link: float | None = None
    busiest_link: str = ""
    busiest_link_bytes_per_step: float | None = None
    samples_per_busiest_gb: float | None = None


class ReportCell(Cell, kw_only=True):
    """A cell's keys over all its repeats, and what it is worth beside the others.

    The step time is the geometric mean of the repeats' medians, its interval Student's over them
    (see `testbed.statistics.runs`); p5 and p95 are of the pooled steps. Peak memory and staleness
    are the largest, other figures medians over repeats. `samples` pools the repeats; `environment`
    and `accuracy_curve` are the first one's. Times are as measured, not undilated; those in
    `resources` are the cluster's.

    Attributes:
        source: folder that the cell was read from.
        repeats: finished repeats, each a run of its own.
        counted_steps: measured steps that count, of all of them.
        run_medians_s: median step of each repeat, as measured, not undilated.
        run_rounds: number of each of these repeats: the round of the sweep that it ran in.
        run_began_s: when each began, Unix time; null: not recorded.
        step_time_smallest_s: the least of them.
        step_time_largest_s: the largest of them.
        step_time_spread: standard deviation of their logarithms; null of one repeat.
        family: number of the family that it was compared in (`Report.families`); null: none.
        rank: 1 + how many cells of the family are significantly faster; null: not ranked.
        rank_note: `tied` if a ranked cell does not differ significantly, `unstable` if its repeats
            spread too much to be ranked; on a dilated cluster, not ranked either: `depends on
            dilation`, `dilation not checked`, `cores busy` (`reporting.dilation`).
        failed_repeats: repeats that failed; `status` is `failed` if no repeat finished.
        efficiency: step time of the no-communication cell of the same work over this one's; null
            without such a cell.
        comparable: whether this cell started from the same parameters and saw the same samples
            as the others of the same workload, workers, seed, batch and steps; null: not recorded.
        comparable_note: in words.
        same_parameters_note: whether it ended with the parameters of the cell that differs from it
            in its memory strategy alone and has none; empty without such a cell.
        memory_error: (predicted - measured) / measured peak of live storages; null: not measured.
        transport: whose connections carried its bytes.
        ratio: its step over that of the fastest framework with a schedule of its own on the same
            transport; null: there is none.
        ratio_low: lower end of its 95 % interval; null: too few runs.
        ratio_high: upper end; null: likewise.
        ratio_to: that framework.
        resources: what it occupied and made of it; null: it failed.
    """

    source: str = ""
    repeats: int = 1
    counted_steps: int = 0
    run_medians_s: list[float] = []
    run_rounds: list[int] = []
    run_began_s: list[float | None] = []
    step_time_smallest_s: float | None = None
    step_time_largest_s: float | None = None
    step_time_spread: float | None = None
    family: int | None = None
    rank: int | None = None
    rank_note: Literal[
        "", "tied", "unstable", "depends on dilation", "dilation not checked", "cores busy"
    ] = ""
    failed_repeats: int = 0
    efficiency: float | None = None
    comparable: bool | None = None
    comparable_note: str = ""
    same_parameters_note: str = ""
    memory_error: float | None = None
    transport: str = ""
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    ratio_to: str = ""
    resources: Resources | None = None


class RatioLine(msgspec.Struct, frozen=True, kw_only=True):
    """A method's step over that of a framework with a schedule of its own, on the same work.

    Attributes:
        group: workload, workers and cluster.
        method: backend and scheduler.
        transport: whose connections carried its bytes.
        framework: that it is compared with.
        framework_transport: whose connections carried that one's.
        ratio: of the steps; below 1 the method is faster.
        low: lower end of its 95 % interval; null: too few runs.
        high: upper end; null: likewise.
        num_pairs: pairs of runs of one round; 0: runs were not paired.
    """

    group: str
    method: str
    transport: str
    framework: str
    framework_transport: str
    ratio: float
    low: float | None
    high: float | None
    num_pairs: int

    @property
    def same_transport(self) -> bool:
        """Whether both went over the same connections."""
        return self.transport == self.framework_transport


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """Cells that were compared with each other, all pairs at once.

    Attributes:
        number: that its cells have.
        name: of what they have in common.
        num_ranked: cells that are ranked.
        num_unstable: cells that are not, because their repeats spread too much.
        num_runs: fewest repeats of a ranked cell.
        spread: pooled standard deviation of the logarithms of the runs' medians; null: none ranked.
        degrees_of_freedom: of that.
        resolves: smallest difference that is significant, as a share; null: none ranked.
    """

    number: int
    name: str
    num_ranked: int
    num_unstable: int
    num_runs: int = 0
    spread: float | None = None
    degrees_of_freedom: int = 0
    resolves: float | None = None


class PredictionError(msgspec.Struct, frozen=True, kw_only=True):
    """How far predictions lie from measurements in some cells.

    Attributes:
        family: `all cells`, `kind` (see `Cell.prediction`), `backend`, `scheduler`, or `link` (what
            it was fitted to).
        name: of the kind, backend or scheduler; empty for all cells.
        num_cells: cells with a prediction.
        median: of |predicted - measured| / measured.
        worst: (predicted - measured) / measured of the cell that is furthest off.
        worst_cell: its backend, scheduler and, if it has one, compressor.
    """

    family: str
    name: str
    num_cells: int
    median: float
    worst: float
    worst_cell: str


class ForecastRow(msgspec.Struct, frozen=True, kw_only=True):
    """A cell beside its forecast; seconds are real ones.

    Attributes:
        name: workload, backend, scheduler and workers.
        backend: without options.
        plan_class: see `ForecastCell`.
        held_out_s: foreseen on a fitted link.
        null_s: on nominal numbers; null: none were given.
        measured_s: geometric mean over runs of their median step.
        num_runs: of the cell.
        spread: standard deviation of ln(median step) over runs; null: one run.
        why: what the records know that the forecast could not; empty: nothing.
    """

    name: str
    backend: str
    plan_class: str
    held_out_s: float
    null_s: float | None
    measured_s: float
    num_runs: int
    spread: float | None
    why: str = ""


class ForecastScore(msgspec.Struct, frozen=True, kw_only=True):
    """How a forecast did in a group of cells; the formulas stand in `reporting.forecast`.

    Attributes:
        plan_class: of the group; empty: all.
        backend: likewise.
        num_cells: in the group.
        median: of |held-out / measured - 1|.
        p90: its 90th percentile.
        null_median: of |null / measured - 1|; null: no nominal numbers.
        null_p90: its 90th percentile.
        skill: of held-out over null; null: no nominal numbers, or these are exact.
        skill_low: lower end of its 95 % interval; null: fewer than three cells.
        skill_high: upper end.
        spread: median of the cells' own; null: one run each.
    """

    plan_class: str
    backend: str
    num_cells: int
    median: float
    p90: float
    null_median: float | None
    null_p90: float | None
    skill: float | None
    skill_low: float | None
    skill_high: float | None
    spread: float | None


class CompressionVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Where a compressor should pay, and whether it did.

    Attributes:
        place: of the compressed cell in `Report.cells`.
        compressor: specification.
        workload: specification.
        backend: specification.
        scheduler: that carried it.
        num_workers: n.
        pays: predicted: `below` a bandwidth, at `any` one, or `never`.
        below_bits_per_s: that bandwidth, of each interface; null unless `below`.
        link_bits_per_s: the fitted link's.
        predicted_gain: step time of the best dense cell over this one's, less 1, by the model at
            the link's bandwidth.
        measured_gain: as measured.
        agrees: whether both are 1 % or more, or both less.
    """

    place: int
    compressor: str
    workload: str
    backend: str
    scheduler: str
    num_workers: int
    pays: str
    below_bits_per_s: float | None
    link_bits_per_s: float
    predicted_gain: float
    measured_gain: float
    agrees: bool


class CompressorBreakEven(msgspec.Struct, frozen=True, kw_only=True):
    """From which bandwidth down a compressor gains 1 % or more, between cells at several rates.

    Attributes:
        compressor: specification.
        workload: specification.
        backend: specification.
        num_workers: n.
        cluster: the emulated cluster without its rate.
        rates_bits_per_s: lowest and highest rate at which both it and dense messages ran.
        measured: at which of the rates it gains: `below` one, `every`, `none`, `unclear` (above
            one, or gain and loss take turns); null: step times are missing.
        measured_bits_per_s: below which; null elsewhere.
        predicted: as `measured`.
        predicted_bits_per_s: the same from the cells' predicted step times.
        foreseen: as `measured`; null: no forecast of all these cells was given.
        foreseen_bits_per_s: the same from a forecast's held-out step times.
    """

    compressor: str
    workload: str
    backend: str
    num_workers: int
    cluster: str
    rates_bits_per_s: tuple[float, float]
    measured_bits_per_s: float | None
    predicted_bits_per_s: float | None
    measured: Pays | None = None
    predicted: Pays | None = None
    foreseen: Pays | None = None
    foreseen_bits_per_s: float | None = None


class Report(msgspec.Struct, kw_only=True):
    """All cells of a report, sorted as the table shows them.

    Attributes:
        answers: one for each setting.
        cells: one per configuration.
        families: cells that were compared, and which difference each comparison resolves.
        ratios: of methods over frameworks, those on the same transport and the fastest of others.
        prediction_errors: over all cells, by backend and by scheduler.
        forecast: how a forecast did, by class of plan and backend; empty without `--forecast`.
        forecast_cells: each cell beside it.
        compression: of the compressed cells that have a dense one beside them and a fitted link.
        break_evens: of compressors that ran at several rates of one emulated cluster.
        notes: what the reader of the table has to know, one line each.
        cautions: those of them that the short report holds, too.
        provenance: commit, versions, machine and launcher, in one line.
    """

    schema: Literal["testbed.report/1"] = REPORT_SCHEMA
    cells: list[ReportCell]
    answers: list[Answer] = []
    families: list[Family] = []
    ratios: list[RatioLine] = []
    prediction_errors: list[PredictionError] = []
    forecast: list[ForecastScore] = []
    forecast_cells: list[ForecastRow] = []
    compression: list[CompressionVerdict] = []
    break_evens: list[CompressorBreakEven] = []
    notes: list[str] = []
    cautions: list[str] = []
    provenance: str = ""


def encode_report(report: Report, *, full: bool = False) -> bytes:
    """The report as indented JSON; without `full` the bulk of each cell is left out."""
    content: dict[str, Any] = msgspec.to_builtins(report)
    if not full:
        for cell in content["cells"]:
            for key in BULK:
                del cell[key]
    return to_json(content)
