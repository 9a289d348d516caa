"""From the cells that were read to a report: aggregated, judged, sorted and annotated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from testbed.records.cell import Cell
from testbed.records.environment import program_words, what_differs
from testbed.records.report import Report, ReportCell
from testbed.reporting.aggregate import Collected, Found, aggregate
from testbed.reporting.answer import answers
from testbed.reporting.compression import (
    break_evens,
    compression_verdicts,
    describe_break_evens,
    describe_verdicts,
)
from testbed.reporting.cores import describe_again, describe_cores, describe_counted
from testbed.reporting.forecast import Compared, describe, scores
from testbed.reporting.naming import short_name
from testbed.reporting.prediction import (
    describe_errors,
    describe_kinds,
    describe_memory,
    prediction_errors,
)
from testbed.reporting.ranking import describe_runs, rank
from testbed.reporting.ratios import (
    compare_with_frameworks,
    describe_ratios,
    describe_transports,
    describe_tuning,
)
from testbed.reporting.resources import resources_of
from testbed.reporting.work import (
    cluster_words,
    is_upper_bound,
    judge,
    same_work,
    sort_cells,
    undilated,
)

_IMPLAUSIBLE = 1.05  # an efficiency above this is no rounding and no luck of the draw
_MEMORY = "processes were {}: compare peak memory only with those that were started alike"


def make_report(collected: Collected, compared: Compared | None = None) -> Report:
    """The report of all cells that were read, and how a forecast of them did."""
    ranked, families = rank(sort_cells(judge(aggregate(collected.cells))))
    compared_cells, ratios = compare_with_frameworks(ranked)
    cells = [
        msgspec.structs.replace(c, resources=resources_of(undilated(c))) for c in compared_cells
    ]
    errors = prediction_errors(cells)
    verdicts = compression_verdicts(cells)
    evens = break_evens(cells, {} if compared is None else compared.held_out_s)
    runs = [found.cell for found in collected.cells]
    rows = () if compared is None else compared.rows
    forecast = scores(rows)
    foreseen = [*(() if compared is None else compared.notes), *describe(rows, forecast)]
    busy = [*_programs(collected.cells), *_opened(collected.cells), *describe_cores(runs)]
    rest = [*describe_again(runs), *collected.notes]
    return Report(
        cells=cells,
        answers=answers(cells),
        families=families,
        ratios=ratios,
        prediction_errors=errors,
        forecast=forecast,
        forecast_cells=list(rows),
        compression=verdicts,
        break_evens=evens,
        notes=[
            *describe_runs(cells),
            *describe_ratios(ratios),
            *describe_transports(cells),
            *describe_tuning(cells),
            *describe_kinds(cells),
            *describe_errors(errors),
            *foreseen,
            *describe_memory(cells),
            *describe_verdicts(verdicts),
            *describe_break_evens(evens),
            *_notes(cells),
            *busy,
            *describe_counted(runs),
            *rest,
        ],
        cautions=[*foreseen, *busy, *rest],
        provenance=provenance(run.environment for run in runs),
    )


def _repeats(found: Iterable[Found]) -> list[list[Cell]]:
    """The finished runs of each cell."""
    repeats: dict[tuple[str, str], list[Cell]] = {}
    for each in found:
        if each.cell.status == "ok":
            repeats.setdefault((each.source, each.group), []).append(each.cell)
    return list(repeats.values())


def _opened(found: Iterable[Found]) -> list[str]:
    """A note where repeats of a cell measured options with which they send other bytes."""
    mixed = [
        runs
        for runs in _repeats(found)
        if len({run.opened_as for run in runs}) > 1
        and len({run.wire_bytes_per_step for run in runs}) > 1
    ]
    if not mixed:
        return []
    total = Counter(run.opened_as or "not recorded" for runs in mixed for run in runs)
    told = ", ".join(f"{runs} as {text}" for text, runs in sorted(total.items()))
    return [
        f"repeats opened their backend with other options, as each measured ({told}; cells: "
        f"{len(mixed)}): they sent other bytes and summed in other orders; name the options"
    ]


def _programs(found: Iterable[Found]) -> list[str]:
    """A note where repeats of one cell were made by different programs or machines."""
    made_in = [[run.environment for run in runs] for runs in _repeats(found)]
    mixed = [(made, names) for made in made_in if (names := what_differs(made))]
    if not mixed:
        return []
    total = Counter(program_words(one, names) for made, names in mixed for one in made)
    told = [f"{runs} by {words}" for words, runs in total.items()]
    return [
        f"repeats of {len(mixed)} cells were made by different programs or machines "
        f"({', '.join(told)}): what changed between them is in their spread and intervals, and in "
        "what is called significant"
    ]


def _notes(cells: Sequence[ReportCell]) -> list[str]:
    """What the reader has to know, each said once with the cells that it is about."""
    about: dict[str, dict[str, None]] = {}
    differ = len({_started(cell) for cell in cells if cell.status == "ok"}) > 1
    for cell in cells:
        told = _notes_of(cell) + [_MEMORY.format(_started(cell))] * differ
        for note in told:
            about.setdefault(note, {})[short_name(cell)] = None
    return [f"{', '.join(names)}: {note}" for note, names in about.items()]


def _started(cell: ReportCell) -> str:
    """How the processes of a cell were started; records of before tell nothing and mean fresh."""
    return str(cell.environment.get("started", "fresh"))


def _notes_of(cell: ReportCell) -> list[str]:
    notes = []
    if cell.status == "failed":
        notes.append(f"failed: {_one_line(cell.error)}")
    elif cell.failed_repeats:
        total = cell.repeats + cell.failed_repeats
        notes.append(f"{cell.failed_repeats} of {total} repeats failed: {_one_line(cell.error)}")
    verdict, why = same_work(cell)
    if verdict == "yes" and why:
        notes.append(f"same work was checked: {why}")
    elif verdict and verdict != "yes" and not is_upper_bound(cell):
        known = f"same work: {verdict}" + (f": {why}" if why else "")
        notes.append(f"not comparable: {why}" if cell.comparable is False else known)
    if cell.same_parameters_note:
        notes.append(cell.same_parameters_note)
    if cell.cluster is not None:
        notes.append(cluster_words(cell))
    if cell.data.startswith("synthetic"):
        notes.append(f"data are made up: {cell.data}")
    if cell.efficiency is not None and cell.efficiency > _IMPLAUSIBLE:
        notes.append(
            "faster than the step without communication, so something else kept the machine busy "
            "during one of them; measure both again, with more repeats"
        )
    if is_upper_bound(cell) and cell.status == "ok":
        notes.append("no gradients are exchanged: upper bound of the speed, not a way to train")
    return notes


def _one_line(error: str) -> str:
    """First and last line of an error: what ended, and what it said last."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    if not lines:
        return "no reason recorded"
    return lines[0] if len(lines) == 1 else f"{lines[0]}: {lines[-1]}"


def provenance(environments: Iterable[Mapping[str, Any]]) -> str:
    """One line of what the cells' environments say; several values of a key stand side by side.

    Example:
        >>> provenance([{"commit": "abc", "launcher": "mpirun"}, {"commit": "abc"}])
        'commit abc; launcher mpirun'
    """
    seen: dict[str, dict[str, None]] = {}
    for environment in environments:
        for key in ("commit", "versions", "cpu", "gpu", "num_cores", "platform", "launcher"):
            text = _in_words(environment.get(key))
            if text:
                seen.setdefault(key, {})[text] = None
    return "; ".join(f"{key} {' and '.join(texts)}" for key, texts in seen.items())


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {v}" for k, v in value.items() if v)
    if isinstance(value, list | tuple):
        return ", ".join(dict.fromkeys(map(str, value)))
    return "" if value is None else str(value)
