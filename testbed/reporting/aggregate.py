"""Puts the repeats of a cell together."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from testbed.base.errors import UsageError
from testbed.noise.steady import steady_steps
from testbed.records.archive import as_folder, is_archive
from testbed.records.cell import Cell, CompressionResult, MemoryResult, StepSamples, decode_cell
from testbed.records.report import ReportCell
from testbed.records.store import PLAN, Store, SweepPlan, cell_files
from testbed.reporting.prediction import memory_error, was_rehearsed
from testbed.statistics.runs import estimate
from testbed.statistics.summary import median_of_known, quantile

# Reads the cells of a folder; one that cannot be read is named, not passed over in silence.


@dataclass(frozen=True)
class Found:
    """A cell, where it was found, and the group of repeats that it belongs to.

    Attributes:
        source: folder of the sweep.
        group: equal for the repeats of one cell.
        cell: as it was read.
        key: name of its file, without `.json`.
    """

    source: str
    group: str
    cell: Cell
    key: str = ""


@dataclass(frozen=True)
class Collected:
    """What was found.

    Attributes:
        cells: in the order of the plan; without a plan, of the files' names.
        notes: files that could not be read, runs that are missing.
    """

    cells: tuple[Found, ...]
    notes: tuple[str, ...]


def collect_cells(directories: Sequence[Path]) -> Collected:
    """The cells of sweeps' folders or archives, of folders of cells or sweeps, and of single files.

    Of several, those without cells are left out, and a note says so.

    Raises:
        UsageError: a folder is missing, or none holds anything that looks like a cell.
    """
    cells: list[Found] = []
    notes: list[str] = []
    empty: list[Path] = []
    for directory in dict.fromkeys(directories):
        with as_folder(directory) as folder:
            plan, problem = _read_plan(folder)
            files = _cell_files(folder)
            if not files:
                empty.append(directory)
                continue
            read = [found for file in files if (found := _read(file, directory, plan, notes))]
        cells += sorted(read, key=lambda found: found.group)
        notes += [problem] if problem else _missing(directory, plan, files)
    if empty and not cells:
        raise UsageError(
            f"{empty[0]} holds no cells yet; give the folder of a sweep, as runs/results/quick-..."
        )
    notes += [f"{directory} is left out: it holds no cells yet" for directory in empty]
    return Collected(tuple(cells), tuple(notes))


def sweeps_in(directories: Iterable[Path]) -> list[Path]:
    """The folders and those of the sweeps below them, each once.

    Below a sweep's own folder there are none. A folder that holds no cells is left out if there are
    sweeps below it.
    """
    found: dict[Path, None] = {}
    for directory in directories:
        nested: list[Path] = []
        if directory.is_dir() and not (directory / PLAN).is_file():
            nested = sorted(path.parent for path in directory.rglob(PLAN))
        own = [] if nested and _no_cells(directory) else [directory]
        found |= dict.fromkeys([*own, *nested])
    return list(found)


def _no_cells(directory: Path) -> bool:
    return not (directory / "cells").is_dir() and not any(
        b"testbed.cell/" in path.read_bytes()[:200] for path in directory.glob("*.json")
    )


def _read(file: Path, directory: Path, plan: SweepPlan | None, notes: list[str]) -> Found | None:
    """The cell in a file; what cannot be read is added to the notes."""
    try:
        cell = decode_cell(file.read_bytes())
    except msgspec.DecodeError as error:
        table = file.with_suffix(".md")
        own = f"; a study's own table is {table}" if table.exists() else ""
        notes.append(f"{file} is left out: it is no testbed.cell/1 ({error}){own}")
        return None
    return Found(str(directory), _group(file.stem, cell, plan), cell, file.stem)


def _group(key: str, cell: Cell, plan: SweepPlan | None) -> str:
    """The cell's number in the plan: a failed run records its settings less resolved than others.

    Without a plan, the configuration itself.
    """
    numbers = {k: index for k, index, _ in plan.order} if plan else {}
    if key in numbers:
        return f"{numbers[key]:06d}"
    return repr(msgspec.structs.replace(cell.config, repeat=0))


def _cell_files(directory: Path) -> list[Path]:
    if directory.is_file():
        return [directory]
    if not directory.is_dir():
        raise UsageError(
            f"no folder {directory}; give the folder of a sweep, as runs/results/quick-..."
        )
    folder = directory / "cells" if (directory / "cells").is_dir() else directory
    return cell_files(folder)


def _read_plan(directory: Path) -> tuple[SweepPlan | None, str]:
    """The plan of a sweep's folder, if it is one; or what is wrong with it."""
    if not (directory / PLAN).is_file():
        return None, ""
    try:
        return Store(directory).read_plan(), ""
    except UsageError as error:
        return None, str(error)


def _missing(directory: Path, plan: SweepPlan | None, files: Sequence[Path]) -> list[str]:
    """A note if the sweep set out to run more than there is."""
    if plan is None:
        return []
    missing = {key for key, _, _ in plan.order} - {file.stem for file in files}
    if not missing:
        return []
    told = f"{len(missing)} of {len(plan.order)} runs of {directory} are missing"
    if is_archive(directory):
        return [f"{told} in the archive"]
    return [f"{told}; go on with: testbed sweep --resume {directory}"]


_MEDIANS = (
    "wire_bytes_per_step",
    "received_bytes_per_step",
    "final_loss",
    "predicted_step_time_s",
    "predicted_unrehearsed_s",
    "num_messages",
    "test_accuracy",
    "training_time_s",
    "cores_busy",
    "cores_stolen",
    "cores_outside",
)
_LARGEST = ("peak_memory_bytes", "max_reference_error", "staleness_max")
_WORK = (
    ("initial_digest", "initial parameters"),
    ("sample_digest", "samples"),
    ("content_digest", "sample contents"),
)
_DIGESTS = ("sample_digest", "content_digest", "initial_digest", "final_digest", "buffer_digest")
_SHARED = (*_DIGESTS, "opened_as")


def aggregate(cells: Iterable[Found]) -> list[ReportCell]:
    """One cell per folder and group, in order of first appearance."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for found in cells:
        groups.setdefault((found.source, found.group), []).append(found.cell)
    return [_combine(source, group) for (source, _), group in groups.items()]


def _combine(source: str, group: Sequence[Cell]) -> ReportCell:
    ok = [cell for cell in group if cell.status == "ok"]
    failed = [cell for cell in group if cell.status == "failed"]
    first = (ok or failed)[0]
    values: dict[str, Any] = {f: getattr(first, f) for f in Cell.__struct_fields__ if f != "schema"}
    values["config"] = msgspec.structs.replace(first.config, repeat=0)
    if ok:
        values |= _figures(ok) | _work(ok)
    values["error"] = failed[0].error if failed else ""
    return ReportCell(**values, source=source, repeats=len(ok), failed_repeats=len(failed))


def _figures(ok: Sequence[Cell]) -> dict[str, Any]:
    values: dict[str, Any] = {
        name: _agreed_or_median([getattr(cell, name) for cell in ok]) for name in _MEDIANS
    }
    for name in _LARGEST:
        known = [v for cell in ok if (v := getattr(cell, name)) is not None]
        values[name] = max(known, default=None)
    for name in ("compute_s", "exposed_comm_s"):
        values[name] = median_of_known(median_s(cell, name) for cell in ok)
    for name in ("time_to_accuracy_s", "time_to_loss_s"):
        values[name] = _times_to_targets([getattr(cell, name) for cell in ok])
    values["compression"] = _compression([c.compression for c in ok if c.compression])
    values["memory"] = found = _memory([c.memory for c in ok if c.memory])
    values["memory_error"] = memory_error(found)
    values["link"] = next((c.link for c in ok if was_rehearsed(c)), ok[0].link)
    values["samples"] = StepSamples(**_pool(cell.samples for cell in ok))
    return values | _step_time(ok)


def _agreed_or_median(values: Sequence[float | None]) -> float | None:
    """The value of all runs, a count as a whole number; else the median of those that have one."""
    known = {value for value in values if value is not None}
    return known.pop() if len(known) == 1 else median_of_known(values)


def _compression(each: Sequence[CompressionResult]) -> CompressionResult | None:
    """Medians over repeats; the memory of the largest."""
    if not each:
        return None
    medians = {
        name: statistics.median(getattr(one, name) for one in each)
        for name in ("encode_s", "communication_s", "decode_s")
    }
    return msgspec.structs.replace(
        each[0],
        **medians,
        sent_bytes=round(statistics.median(one.sent_bytes for one in each)),
        relative_error=median_of_known(one.relative_error for one in each),
        density=median_of_known(one.density for one in each),
        state_bytes=max(one.state_bytes for one in each),
    )


def _memory(each: Sequence[MemoryResult]) -> MemoryResult | None:
    """Of the repeat whose measured peak is largest; resident is the largest of all."""
    if not each:
        return None
    largest = max(each, key=lambda one: one.resident_bytes or 0)
    return msgspec.structs.replace(
        max(each, key=lambda one: one.measured_bytes or 0),
        resident_bytes=largest.resident_bytes,
        kept_bytes=largest.kept_bytes,
    )


def _step_time(ok: Sequence[Cell]) -> dict[str, Any]:
    """The step time over runs, and the quantiles of their steps.

    A run whose record holds no steps enters with its median.
    """
    counted = [_counted_s(cell.samples, "step_time_s") for cell in ok]
    medians = [
        quantile(steps, 0.5) if steps else cell.step_time_s
        for cell, steps in zip(ok, counted, strict=True)
    ]
    known = [median for median in medians if median]
    timed = [cell for cell, median in zip(ok, medians, strict=True) if median]
    found, pooled = estimate(known), list(itertools.chain.from_iterable(counted))
    if found is None:
        return dict.fromkeys(("step_time_low_s", "step_time_high_s"))
    # Samples of one step are the same in all repeats; the speed follows from the step time.
    per_step = median_of_known(
        c.samples_per_s * c.step_time_s for c in ok if c.samples_per_s and c.step_time_s
    )
    unfiltered = estimate([m for cell in ok if (m := _unfiltered_s(cell))])
    quantiles = {"step_time_p5_s": 0.05, "step_time_p95_s": 0.95}
    return {
        "step_time_s": found.time,
        "step_time_low_s": found.low,
        "step_time_high_s": found.high,
        "step_time_smallest_s": found.smallest,
        "step_time_largest_s": found.largest,
        "step_time_spread": found.spread,
        "step_time_unfiltered_s": unfiltered.time if unfiltered else None,
        "run_medians_s": known,
        "run_rounds": [cell.config.repeat for cell in timed],
        "run_began_s": [began_s(cell) for cell in timed],
        "counted_steps": len(pooled),
        "samples_per_s": per_step / found.time if per_step else None,
    } | {
        name: quantile(pooled, share)
        if pooled
        else median_of_known(getattr(cell, name) for cell in ok)
        for name, share in quantiles.items()
    }


def _unfiltered_s(cell: Cell) -> float | None:
    """Median of a run's steps, those that were disturbed included."""
    steps = steady_steps(cell.samples.step_time_s, (), cell.samples.unsteady)
    return quantile(steps, 0.5) if steps else cell.step_time_unfiltered_s


def _counted_s(samples: StepSamples, name: str) -> list[float]:
    return steady_steps(getattr(samples, name), samples.cores_taken, samples.unsteady)


def median_s(cell: Cell, name: str) -> float | None:
    """Median over the steps of a run that count of a time, as measured, not undilated.

    A run whose record holds no steps has the median that it tells.
    """
    counted = _counted_s(cell.samples, name)
    return quantile(counted, 0.5) if counted else getattr(cell, name)


def _work(ok: Sequence[Cell]) -> dict[str, Any]:
    """Digests that all repeats share, and whether all did the work of the reference."""
    values: dict[str, Any] = {}
    for name in _SHARED:
        seen = {getattr(cell, name) for cell in ok}
        values[name] = seen.pop() if len(seen) == 1 else ""
    if other := _other_work(ok):
        return values | {"identical_work": False, "identical_work_note": other}
    verdicts = {cell.identical_work for cell in ok}
    values["identical_work"] = False if False in verdicts else None if None in verdicts else True
    # The notes of the repeats that decided, each once.
    decisive = [c for c in ok if c.identical_work is values["identical_work"]]
    notes = dict.fromkeys(cell.identical_work_note for cell in decisive)
    values["identical_work_note"] = "; ".join(filter(None, notes))
    return values


def began_s(cell: Cell) -> float | None:
    """When a run began, Unix time; None: not recorded."""
    told = cell.environment.get("began")
    return None if told is None else datetime.fromisoformat(told).timestamp()


def _other_work(ok: Sequence[Cell]) -> str:
    """What tells that repeats of a cell trained something else, as after a file was changed."""
    for name, what in _WORK:
        seen = [digest[:8] for digest in dict.fromkeys(getattr(c, name) for c in ok) if digest]
        if len(seen) > 1:
            return f"repeats did different work: their {what} differ ({', '.join(seen)})"
    return ""


def _times_to_targets(times: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """Median over repeats; a repeat that never came there counts as later than all others."""
    result: dict[str, float | None] = {}
    for target in dict.fromkeys(t for each in times for t in each):
        reached = [float("inf") if (t := each.get(target)) is None else t for each in times]
        median = statistics.median(reached)
        result[target] = None if median == float("inf") else median
    return result


def _pool(samples: Iterable[StepSamples]) -> dict[str, list[Any]]:
    each = list(samples)
    return {
        name: list(itertools.chain.from_iterable(getattr(s, name) for s in each))
        for name in StepSamples.__struct_fields__
    }
