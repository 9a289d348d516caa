"""The columns of the table, once for all formats: what they show, in which unit, how exactly."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from testbed.base.axes import AXES, COMPRESSORS
from testbed.base.config import RunConfig
from testbed.base.units import rounded
from testbed.records.cell import CompressionResult, MemoryResult
from testbed.records.report import ReportCell, Resources
from testbed.reporting.naming import marks_of, part_of, tuning_of
from testbed.reporting.prediction import kind_of, prediction_error
from testbed.reporting.work import same_work
from testbed.sweeping.progress import last_line

Value = str | int | float | bool | None
Part = TypeVar("Part")


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        title: heading for people; a line break where it may be broken.
        key: heading for programs, with the unit.
        value: the figure in the unit of `key`, exact; None: not measured.
        text: the same for people, rounded; empty: not measured.
        numeric: aligned to the right.
        wide: left out of the terminal's table, which has no room for it.
    """

    title: str
    key: str
    value: Callable[[ReportCell], Value]
    text: Callable[[ReportCell], str]
    numeric: bool = True
    wide: bool = False


def columns_for(cells: Sequence[ReportCell]) -> list[Column]:
    """The columns of these cells; a setting, or folder, that differs and has none gets one."""
    several = len({cell.source for cell in cells}) > 1
    fixed = [_words("source", lambda c: c.source)] if several else []
    for axis in AXES:
        value = functools.partial(part_of, axis=axis)
        differs = len({value(cell) for cell in cells}) > 1
        fixed.append((_words if axis.shown or differs else _hidden)(axis.what, value))
    varied = _varied(cells)
    if varied:
        fixed.append(_words("setting", lambda c: settings(c.config, varied)))
    known = any(tuning_of(cell) != "-" for cell in cells)
    tuning = (_words if known else _hidden)("tuning", tuning_of)
    fixed.append(dataclasses.replace(tuning, wide=True))
    figures = [*_FIGURES, *_targets(cells), *_COMPRESSION, *_MEMORY, *_RESOURCES]
    return [*fixed, *figures, *_ENDING]


def compression_columns(cells: Sequence[ReportCell]) -> list[Column]:
    """What compressing cost and kept, for a table of its own where one table has no room."""
    fixed = [c for c in columns_for(cells) if c.title and c.key in ("backend", "scheduler")]
    fixed.append(_words("compressor", lambda c: c.config.compressor))
    accuracy = [c for c in _FIGURES if c.key == "test_accuracy"]
    shown = [*fixed, *_COMPRESSION, *accuracy, *_targets(cells)]
    return [c for c in shown if any(c.text(cell) for cell in cells)]


def memory_columns(cells: Sequence[ReportCell]) -> list[Column]:
    """What a step's memory was foreseen to be and was, for a table of its own."""
    axes = ("workload", "backend", "scheduler")
    fixed = [c for c in columns_for(cells) if c.title and c.key in axes]
    fixed.append(_words("memory", lambda c: c.config.memory))
    if any(c.config.compressor != COMPRESSORS.default for c in cells):
        fixed.append(_words("compressor", lambda c: c.config.compressor))
    batch = Column("batch", "batch_size", lambda c: c.batch_size, lambda c: str(c.batch_size))
    shown = [*fixed, batch, *_MEMORY]
    return [c for c in shown if any(c.text(cell) for cell in cells)]


def resource_columns(cells: Sequence[ReportCell]) -> list[Column]:
    """What the cells occupied and made of it, for a table of its own."""
    axes = ("backend", "scheduler", "num_workers")
    fixed = [c for c in columns_for(cells) if c.title and c.key in axes]
    shown = [*fixed, *(c for c in _ENDING if c.key == "num_machines"), *_RESOURCES]
    return [c for c in shown if any(c.text(cell) for cell in cells)]


def settings(config: RunConfig, names: Sequence[str]) -> str:
    """Some settings in words.

    Example:
        >>> settings(RunConfig(seed=2), ["seed", "batch_size"])
        'seed=2'
    """
    values = {name: getattr(config, name) for name in names}
    return " ".join(f"{name}={value}" for name, value in values.items() if value is not None)


def short_error(cell: ReportCell) -> str:
    """The error in a few words, for a row; the notes hold it in full."""
    words = last_line(cell.error) or "no reason recorded"
    return words if len(words) <= 60 else words[:57] + "..."


def _varied(cells: Sequence[ReportCell]) -> list[str]:
    shown = (*(axis.what for axis in AXES), "workers", "predict", "repeat", "tune", "tuned")
    # A failed run records its settings as they were asked for, which would look like others.
    configs = [cell.config for cell in cells if cell.status == "ok"]
    return [
        name
        for name in RunConfig.__struct_fields__
        if name not in shown and len({getattr(config, name) for config in configs}) > 1
    ]


def _words(key: str, value: Callable[[ReportCell], str], title: str = "") -> Column:
    return Column(title or key, key, value, value, numeric=False)


def _figure(
    title: str,
    key: str,
    value: Callable[[ReportCell], float | None],
    *,
    scale: float = 1.0,
    wide: bool = False,
) -> Column:
    """A measured figure; people read it times `scale`, the unit in the title."""

    def text(cell: ReportCell) -> str:
        figure = value(cell)
        return "" if figure is None else rounded(figure * scale)

    return Column(title, key, value, text, wide=wide)


def _wide_ms(title: str, key: str, value: Callable[[ReportCell], float | None]) -> Column:
    """A time that the terminal has no room for."""
    return _figure(title, key, value, scale=1e3, wide=True)


def _of_runs(cell: ReportCell, figure: float | None) -> float | None:
    """A figure over runs, of a cell that has several."""
    return figure if len(cell.run_medians_s) > 1 else None


def _counted_text(cell: ReportCell) -> str:
    return str(cell.counted_steps or "")


def _step_text(cell: ReportCell) -> str:
    if cell.step_time_s is None:
        return ""
    text, (ends, is_interval) = rounded(cell.step_time_s * 1e3), step_range(cell)
    if ends is None:
        return text
    low, high = (rounded(end * 1e3) for end in ends)
    return f"{text} [{low}, {high}]" if is_interval else f"{text} ({low}-{high})"


def step_range(cell: ReportCell) -> tuple[tuple[float, float] | None, bool]:
    """The range told beside a step time, and whether it is a 95 % interval.

    Of two runs the faster and the slower one, of one run its 5th and 95th percentile.
    """
    runs = (cell.step_time_smallest_s, cell.step_time_largest_s)
    if len(cell.run_medians_s) == 2 and runs[0] is not None and runs[1] is not None:
        return (runs[0], runs[1]), False
    if cell.step_time_low_s is not None and cell.step_time_high_s is not None:
        return (cell.step_time_low_s, cell.step_time_high_s), True
    if cell.step_time_p5_s is not None and cell.step_time_p95_s is not None:
        return (cell.step_time_p5_s, cell.step_time_p95_s), False
    return None, False


def _rank_text(cell: ReportCell) -> str:
    return " ".join(filter(None, ("" if cell.rank is None else str(cell.rank), cell.rank_note)))


def _ratio_text(cell: ReportCell) -> str:
    if cell.ratio is None:
        return ""
    if cell.ratio_low is None or cell.ratio_high is None:
        return f"{cell.ratio:.3f}"
    return f"{cell.ratio:.3f} [{cell.ratio_low:.3f}, {cell.ratio_high:.3f}]"


def _relay_share(cell: ReportCell) -> float | None:
    """Processor time over wall time of the relay that made an emulated cluster's latency."""
    state = (cell.cluster or {}).get("relay")
    return state["processor_s"] / state["wall_s"] if state and state["wall_s"] else None


def _workers_text(cell: ReportCell) -> str:
    servers = f"+{cell.num_servers}" if cell.num_servers else ""
    return f"{cell.num_workers}{servers}"


def _machines_text(cell: ReportCell) -> str:
    return f"{cell.num_machines}/{cell.num_processes}" if cell.num_processes else ""


def _staleness_text(cell: ReportCell) -> str:
    return "" if cell.staleness_max is None else str(cell.staleness_max)


def _targets(cells: Sequence[ReportCell]) -> list[Column]:
    """A column for each accuracy and loss that some cell was to reach."""
    accuracies = dict.fromkeys(t for cell in cells for t in cell.time_to_accuracy_s)
    losses = dict.fromkeys(t for cell in cells for t in cell.time_to_loss_s)
    return [
        *(
            _target(f"{float(t) * 100:g} %", "accuracy", t, lambda cell: cell.time_to_accuracy_s)
            for t in sorted(accuracies, key=float)
        ),
        *(
            _target(f"loss {t}", "loss", t, lambda cell: cell.time_to_loss_s)
            for t in sorted(losses, key=float, reverse=True)
        ),
    ]


def _target(
    title: str, kind: str, target: str, times: Callable[[ReportCell], Mapping[str, float | None]]
) -> Column:
    def value(cell: ReportCell) -> float | None:
        return times(cell).get(target)

    def text(cell: ReportCell) -> str:
        figure = value(cell)
        if figure is not None:
            return rounded(figure)
        return "never" if target in times(cell) else ""

    return Column(f"s to\n{title}", f"time_to_{kind}_{target}_s", value, text)


def _hidden(key: str, value: Callable[[ReportCell], Value]) -> Column:
    """A column for programs, with no place in a table for people."""
    return Column("", key, value, lambda cell: "", wide=True)


_FIGURES = (
    Column("work-\ners", "num_workers", lambda c: c.num_workers, _workers_text),
    _hidden("num_servers", lambda c: c.num_servers),
    Column("step ms\n[95 %]", "step_time_s", lambda c: c.step_time_s, _step_text),
    Column("rank", "rank", lambda c: c.rank, _rank_text),
    Column(
        "ratio, same\ntransport", "ratio", lambda c: c.ratio, lambda c: _ratio_text(c), wide=True
    ),
    _hidden("ratio_low", lambda c: c.ratio_low),
    _hidden("ratio_high", lambda c: c.ratio_high),
    _hidden("ratio_to", lambda c: c.ratio_to),
    _hidden("transport", lambda c: c.transport),
    _hidden("rank_note", lambda c: c.rank_note),
    _hidden("family", lambda c: c.family),
    Column("runs", "repeats", lambda c: c.repeats, lambda c: str(c.repeats or "")),
    Column("coun-\nted", "counted_steps", lambda c: c.counted_steps, lambda c: _counted_text(c)),
    _figure("pred.\nms", "predicted_step_time_s", lambda c: c.predicted_step_time_s, scale=1e3),
    _figure("pred.\nerr %", "prediction_error", lambda c: prediction_error(c), scale=100),
    _words("prediction", lambda c: kind_of(c), "pred.\nkind"),
    _hidden("num_messages", lambda c: c.num_messages),
    _hidden("step_time_low_s", lambda c: c.step_time_low_s),
    _hidden("step_time_high_s", lambda c: c.step_time_high_s),
    _wide_ms("min\nms", "step_time_smallest_s", lambda c: _of_runs(c, c.step_time_smallest_s)),
    _wide_ms("max\nms", "step_time_largest_s", lambda c: _of_runs(c, c.step_time_largest_s)),
    _hidden("step_time_spread", lambda c: c.step_time_spread),
    _wide_ms("p5 ms", "step_time_p5_s", lambda c: c.step_time_p5_s),
    _wide_ms("p95 ms", "step_time_p95_s", lambda c: c.step_time_p95_s),
    _wide_ms("unfil-\ntered ms", "step_time_unfiltered_s", lambda c: c.step_time_unfiltered_s),
    _figure("samples\n/s", "samples_per_s", lambda c: c.samples_per_s),
    _figure("comp.\nms", "compute_s", lambda c: c.compute_s, scale=1e3),
    _figure("exp.\nms", "exposed_comm_s", lambda c: c.exposed_comm_s, scale=1e3),
    Column("stale\nsteps", "staleness_max", lambda c: c.staleness_max, _staleness_text),
    _figure("eff.\n%", "efficiency", lambda c: c.efficiency, scale=100),
    _figure("MB/\nstep", "wire_bytes_per_step", lambda c: c.wire_bytes_per_step, scale=1e-6),
    _figure("peak\nMB", "peak_memory_bytes", lambda c: c.peak_memory_bytes, scale=1e-6),
    _figure("cores\nbusy %", "cores_busy", lambda c: c.cores_busy, scale=100, wide=True),
    _hidden("cores_stolen", lambda c: c.cores_stolen),
    _hidden("cores_outside", lambda c: c.cores_outside),
    _figure("relay\n%", "relay_share_of_a_core", lambda c: _relay_share(c), scale=100, wide=True),
    _figure("acc.\n%", "test_accuracy", lambda c: c.test_accuracy, scale=100),
)


def _of(
    part: Callable[[ReportCell], Part | None],
    title: str,
    key: str,
    value: Callable[[Part], float | None],
    scale: float = 1.0,
) -> Column:
    """A figure of a part of the cell, for cells that have that part."""

    def figure(cell: ReportCell) -> float | None:
        found = part(cell)
        return None if found is None else value(found)

    return _figure(title, key, figure, scale=scale, wide=True)


def _coded(cell: ReportCell) -> CompressionResult | None:
    return cell.compression


def _held(cell: ReportCell) -> MemoryResult | None:
    return cell.memory


def _occupied(cell: ReportCell) -> Resources | None:
    return cell.resources


_COMPRESSION = (
    _of(_coded, "MB\nbefore", "dense_bytes", lambda c: c.dense_bytes, 1e-6),
    _of(_coded, "MB\nsent", "sent_bytes", lambda c: c.sent_bytes, 1e-6),
    _of(_coded, "enc.\nms", "encode_s", lambda c: c.encode_s, 1e3),
    _of(_coded, "comm.\nms", "communication_s", lambda c: c.communication_s, 1e3),
    _of(_coded, "dec.\nms", "decode_s", lambda c: c.decode_s, 1e3),
    _of(_coded, "rel.\nerr %", "relative_error", lambda c: c.relative_error, 100),
    _of(_coded, "dens.\n%", "density", lambda c: c.density, 100),
    _of(_coded, "state\nMB", "state_bytes", lambda c: c.state_bytes, 1e-6),
)


_MEMORY = (
    _of(_held, "pred.\npeak MB", "memory_predicted_bytes", lambda m: m.predicted_bytes, 1e-6),
    _of(_held, "meas.\npeak MB", "memory_measured_bytes", lambda m: m.measured_bytes, 1e-6),
    _figure("peak\nerr %", "memory_error", lambda c: c.memory_error, scale=100, wide=True),
    _of(_held, "moved\nMB", "memory_moved_bytes", lambda m: m.moved_bytes, 1e-6),
    _of(_held, "peak +\nmoved MB", "memory_with_moved_bytes", lambda m: m.with_moved_bytes, 1e-6),
    _of(_held, "resi-\ndent MB", "memory_resident_bytes", lambda m: m.resident_bytes, 1e-6),
)


_RESOURCES = (
    _of(
        _occupied,
        "/s a\nmachine",
        "samples_per_s_per_machine",
        lambda r: r.samples_per_s_per_machine,
    ),
    _of(_occupied, "/s a\ncore", "samples_per_s_per_core", lambda r: r.samples_per_s_per_core),
    _of(_occupied, "/s a\nlink", "samples_per_s_per_link", lambda r: r.samples_per_s_per_link),
    _of(
        _occupied,
        "busiest\nMB/step",
        "busiest_link_bytes_per_step",
        lambda r: r.busiest_link_bytes_per_step,
        1e-6,
    ),
    _of(
        _occupied,
        "samples/\nbusiest GB",
        "samples_per_busiest_gb",
        lambda r: r.samples_per_busiest_gb,
    ),
    dataclasses.replace(
        _words(
            "busiest_link", lambda c: c.resources.busiest_link if c.resources else "", "busiest"
        ),
        wide=True,
    ),
)

_ENDING = (
    Column("mach./\nproc.", "num_machines", lambda c: c.num_machines, _machines_text, wide=True),
    _hidden("num_processes", lambda c: c.num_processes),
    Column(
        "dil.",
        "dilation",
        lambda c: c.dilation,
        lambda c: "" if c.dilation == 1 else f"{c.dilation:g}",
    ),
    _hidden("cluster", lambda c: c.config.cluster),
    _words("same_work", lambda c: same_work(c)[0], "same\nwork"),
    _hidden("same_work_note", lambda c: same_work(c)[1]),
    _hidden("methods", lambda c: marks_of(c)),
    _hidden("comparable", lambda c: c.comparable),
    _hidden("failed_repeats", lambda c: c.failed_repeats),
    Column("status", "status", lambda c: c.status, lambda c: _status(c), numeric=False),
    _hidden("error", lambda c: c.error),
    _hidden("command", lambda c: c.command),
)


def _status(cell: ReportCell) -> str:
    if cell.status == "failed":
        return f"failed: {short_error(cell)}"
    if cell.failed_repeats:
        return f"ok ({cell.failed_repeats} failed)"
    return "ok"
