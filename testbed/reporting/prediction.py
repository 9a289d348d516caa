"""How well the model predicted: the error of each cell, and its middle and worst per family."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from testbed.base.axes import COMPRESSORS
from testbed.prediction.nominal import seen_in_run
from testbed.records.cell import Cell, MemoryResult
from testbed.records.report import PredictionError, ReportCell

REHEARSED = "rehearsed steps"
BEFORE = "those plans before rehearsing"


def kind_of(cell: Cell) -> str:
    """`null`, `held-out` or `calibrated`, see `Cell.prediction`; empty without a prediction.

    Records of before do not say, or called those held-out that timed their own compressor or
    profiled their own compute. Without `--link` they measured the link in the cell itself.

    Example:
        >>> from testbed.base.config import RunConfig
        >>> kind_of(Cell(backend="gloo", workload="w", num_workers=2, config=RunConfig(),
        ...              predicted_step_time_s=1.5))
        'calibrated'
    """
    if cell.predicted_step_time_s is None:
        return ""
    told = cell.prediction or ("calibrated" if cell.config.link is None else "held-out")
    return "calibrated" if told == "held-out" and seen_in_run(cell.config) else told


KINDS: Final = {
    "null": "nominal rate and latency, no link measured",
    "held-out": "on links that were fitted before, nothing of the cells seen",
    "calibrated": "with links, compute or compressors measured in the cells themselves: no "
    "forecasts",
}


def kinds_text(cells: Iterable[Cell]) -> str:
    """Of which kinds the predictions of a table are; empty: it has none."""
    found = dict.fromkeys(filter(None, map(kind_of, cells)))
    return f"pred.: {', '.join(found)}" if found else ""


def describe_kinds(cells: Iterable[Cell]) -> list[str]:
    """A line for people on each kind of prediction that stands in a table."""
    found = {kind_of(cell) for cell in cells}
    return [
        f"predictions that are {kind}: {words}" for kind, words in KINDS.items() if kind in found
    ]


def prediction_error(cell: Cell) -> float | None:
    """(predicted - measured) / measured step time; negative where the model is too fast.

    Example:
        >>> from testbed.base.config import RunConfig
        >>> cell = Cell(backend="gloo", workload="w", num_workers=2, config=RunConfig(),
        ...             step_time_s=2.0, predicted_step_time_s=1.5)
        >>> prediction_error(cell)
        -0.25
    """
    return _missed(cell, cell.predicted_step_time_s)


def _missed(cell: Cell, predicted_s: float | None) -> float | None:
    if predicted_s is None or not cell.step_time_s:
        return None
    return predicted_s / cell.step_time_s - 1


def memory_error(found: MemoryResult | None) -> float | None:
    """(predicted - measured) / measured peak of live storages; negative where more was alive.

    Example:
        >>> memory_error(MemoryResult(predicted={"weights": 9}, measured={"weights": 10}))
        -0.1
    """
    if found is None or not found.measured_bytes:
        return None
    return (found.predicted_bytes - found.measured_bytes) / found.measured_bytes


def describe_memory(cells: Iterable[ReportCell]) -> list[str]:
    """A line for people on predicted peaks of live storages, where two or more were measured."""
    known = [(cell, cell.memory_error) for cell in cells if cell.memory_error is not None]
    if len(known) < 2:
        return []
    cell, worst = max(known, key=lambda pair: abs(pair[1]))
    median = statistics.median(abs(error) for _, error in known)
    text = (
        f"predicted peak of live storages, {len(known)} cells: error {median:.2%} in the median, "
        f"{worst:+.2%} at worst ({cell.workload}, memory {cell.config.memory})"
    )
    return [text.replace("%", " %")]


def prediction_errors(cells: Iterable[ReportCell]) -> list[PredictionError]:
    """All predicted cells, then by kind, backend and scheduler (without their options).

    Where some links were brought to messages of rehearsed steps, also by what the link was fitted
    to: there less is left to predict; and what the model says of those cells without rehearsing, as
    it must of clusters that nobody has. Nothing where fewer than two cells were predicted: the
    table says it all.
    """
    known = [(cell, error) for cell in cells if (error := prediction_error(cell)) is not None]
    if len(known) < 2:
        return []
    rows = [_sum_up("all cells", "", known)]
    families: dict[str, Callable[[ReportCell], str]] = {
        "kind": kind_of,
        "backend": lambda cell: _name(cell.backend),
        "scheduler": lambda cell: _name(cell.scheduler),
    }
    if any(_fitted_to(cell) == REHEARSED for cell, _ in known):
        families["link"] = _fitted_to
    for family, name_of in families.items():
        names = dict.fromkeys(name_of(cell) for cell, _ in known)
        rows += [
            _sum_up(family, name, [(c, e) for c, e in known if name_of(c) == name])
            for name in names
        ]
    before = [
        (cell, error)
        for cell, _ in known
        if (error := _missed(cell, cell.predicted_unrehearsed_s)) is not None
    ]
    if before:
        rows.append(_sum_up("link", BEFORE, before))
    return rows


def describe_errors(rows: Sequence[PredictionError]) -> list[str]:
    """Lines for people: all cells, then one line for each family.

    Example:
        >>> row = PredictionError(family="all cells", name="", num_cells=4, median=0.012,
        ...                       worst=-0.05, worst_cell="gloo, dear")
        >>> describe_errors([row])
        ['prediction error of 4 cells: median 1.2 %, worst -5.0 % (gloo, dear)']
    """
    lines = []
    for family in dict.fromkeys(row.family for row in rows):
        of_family = [row for row in rows if row.family == family]
        if of_family[0].name == "":
            (row,) = of_family
            lines.append(
                f"prediction error of {row.num_cells} cells: median {row.median:.1%}, "
                f"worst {row.worst:+.1%} ({row.worst_cell})".replace("%", " %")
            )
            continue
        each = [f"{row.name} {row.median:.1%} / {row.worst:+.1%}" for row in of_family]
        text = f"prediction error by {family}, median / worst: {', '.join(each)}"
        lines.append(text.replace("%", " %"))
    return lines


def _sum_up(family: str, name: str, known: Sequence[tuple[ReportCell, float]]) -> PredictionError:
    worst_cell, worst = max(known, key=lambda pair: abs(pair[1]))
    codec = [] if COMPRESSORS.is_default(worst_cell.config) else [worst_cell.config.compressor]
    return PredictionError(
        family=family,
        name=name,
        num_cells=len(known),
        median=statistics.median(abs(error) for _, error in known),
        worst=worst,
        worst_cell=", ".join([worst_cell.backend, worst_cell.scheduler, *codec]),
    )


def was_rehearsed(cell: Cell) -> bool:
    """Whether the link was brought to what messages took in rehearsed steps."""
    return cell.link is not None and not cell.link.keys().isdisjoint(("missing_s", "stretched"))


def _fitted_to(cell: Cell) -> str:
    return REHEARSED if was_rehearsed(cell) else "messages in rows"


def _name(specification: str) -> str:
    return specification.partition(":")[0]
