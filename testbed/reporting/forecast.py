"""How a forecast did: error and skill over nominal numbers, by class of plan and backend."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType

import msgspec

from testbed.base.config import RunConfig
from testbed.noise.steal_time import TOO_MUCH, stolen_of
from testbed.records.cell import Cell
from testbed.records.environment import program_of
from testbed.records.forecast import Forecast, ForecastCell, cell_name
from testbed.records.report import ForecastRow, ForecastScore
from testbed.reporting.cores import BUSY, is_core_bound
from testbed.statistics.runs import pooled_spread
from testbed.statistics.summary import quantile

BEGAN = "began"  # key of a cell's environment
RESAMPLES = 2000
LEAST_CELLS = 10  # fewer have too few resamples for an interval
MISS_SPREADS = 3.0  # a miss of more than so many times the cell's own spread is named

FORMULA = (
    "error = |predicted / measured - 1|; skill = 1 - sum |ln(held-out / measured)| / "
    "sum |ln(null / measured)| over the cells that have both: 1 = no error, 0 = no better than "
    "nominal numbers, [95 % bootstrap over cells, from 10 on]; spread = standard deviation of "
    "ln(median step) over the runs of a cell, pooled within each program and machine that made them"
)


@dataclass(frozen=True)
class Compared:
    """What a forecast can be held against.

    Attributes:
        rows: one for each cell that began after the forecast was written.
        notes: what was checked, and which cells are left out for which reason.
        held_out_s: the foreseen step of each of these cells, by the settings in its record.
    """

    rows: tuple[ForecastRow, ...]
    notes: tuple[str, ...]
    held_out_s: Mapping[RunConfig, float] = field(default_factory=dict)


def compare(
    forecast: Forecast,
    runs: Iterable[tuple[str, Cell]],
    links: Mapping[str, frozenset[str]] = MappingProxyType({}),
) -> Compared:
    """The cells that a forecast speaks of, beside it.

    Cells that began before it was written, or do not tell when they did, are left out and told; so
    are those that it does not hold: other settings than those of the sweep that it was made for.

    Args:
        forecast: with a digest that was checked (`load_forecast`).
        runs: key without a repeat and record of each finished run.
        links: digests of each link file when the sweeps began, by its name.
    """
    foreseen = {cell.key: cell for cell in forecast.cells}
    written = datetime.fromisoformat(forecast.written)
    groups: dict[str, list[Cell]] = {}
    unknown: list[str] = []
    early: list[str] = []
    undated: list[str] = []
    for key, cell in runs:
        began = cell.environment.get(BEGAN)
        name = foreseen[key].name if key in foreseen else cell_name(cell.config)
        if key not in foreseen:
            unknown.append(name)
        elif began is None:
            undated.append(name)
        elif datetime.fromisoformat(str(began)) <= written:
            early.append(name)
        elif cell.step_time_s:
            groups.setdefault(key, []).append(cell)
    rows = [row for key, cells in groups.items() if (row := _row(foreseen[key], cells))]
    held_out_s = {
        msgspec.structs.replace(cell.config, repeat=0): time_s
        for key, cells in groups.items()
        for cell in cells
        if (time_s := foreseen[key].held_out_s) is not None
    }
    notes = [
        f"forecast {forecast.digest} of {forecast.name}, written {forecast.written}: unchanged "
        f"since, and older than each of the {len(rows)} cells that it is held against"
    ]
    notes += _of_links(forecast, links)
    left_out = {
        "began before it was written": early,
        "do not tell when they began": undated,
        "are not in it (other settings than those of the sweep that it was made for, or names of "
        "files that `testbed pack` cut: then report the folder itself)": unknown,
    }
    notes += [
        f"{len(names)} runs {why} and are left out: {_listed(names)}"
        for why, names in left_out.items()
        if names
    ]
    others = [
        foreseen[key].name for key, cells in groups.items() if _of_other_plan(foreseen[key], cells)
    ]
    if others:
        notes.append(
            f"{len(others)} cells ran another plan than the one that the forecast is of: "
            f"{_listed(others)}"
        )
    silent = [cell for cell in forecast.cells if cell.held_out_s is None]
    notes += [f"not foreseen: {cell.name}: {cell.why_not}" for cell in silent]
    lacking = sum(cell.held_out_s is not None for cell in forecast.cells) - len(rows)
    notes += [f"{lacking} foreseen cells have not run after it"] if lacking > 0 else []
    return Compared(tuple(rows), tuple(notes), held_out_s)


def _of_links(forecast: Forecast, links: Mapping[str, frozenset[str]]) -> list[str]:
    """Whether the cells had the links that the forecast is of, and what cannot be told of it."""
    told = []
    if (forecast.commit or "").endswith("-dirty"):
        told.append(
            f"the forecast was written by {forecast.commit}: with changes that no commit holds"
        )
    common = forecast.links.keys() & links.keys()
    changed = sorted(name for name in common if links[name] != {forecast.links[name]})
    if changed:
        told.append(
            f"links that changed between the forecast and its cells: {', '.join(changed)}: what it "
            "foresees is of other links"
        )
    elif common:
        told.append(f"links of cells that the forecast is of: {len(common)}, the same by digest")
    elif forecast.links:
        told.append(
            "whether cells had the forecast's links cannot be told: "
            + ("they name others" if links else "their sweep keeps no digests")
        )
    return told


def _row(foreseen: ForecastCell, cells: Sequence[Cell]) -> ForecastRow | None:
    if foreseen.held_out_s is None:
        return None
    alike: dict[object, list[float]] = {}
    for cell in cells:
        made_by = frozenset(program_of(cell.environment).items())
        alike.setdefault(made_by, []).append(cell.step_time_s or 0.0)
    spread = pooled_spread(alike.values())
    return ForecastRow(
        name=foreseen.name,
        backend=foreseen.backend,
        plan_class=foreseen.plan_class,
        held_out_s=foreseen.held_out_s,
        null_s=foreseen.null_s,
        measured_s=_measured_s(cells),
        num_runs=len(cells),
        spread=spread,
        why=_why(foreseen, cells, spread),
    )


def _measured_s(cells: Sequence[Cell]) -> float:
    return statistics.geometric_mean(cell.step_time_s or 0.0 for cell in cells)


def _why(foreseen: ForecastCell, cells: Sequence[Cell], spread: float | None) -> str:
    """What the records know that the forecast could not; empty: nothing.

    What only makes steps longer explains no step that was shorter than foreseen, and other plans
    explain nothing where runs of the foreseen one miss as well.
    """
    told = []
    others = _of_other_plan(foreseen, cells)
    kept = [cell for cell in cells if cell not in others]
    if others and kept and spread is not None and foreseen.held_out_s:
        others = [] if _is_miss(foreseen.held_out_s, _measured_s(kept), spread) else others
    if others:
        told.append("another plan was carried out")
    slower = all((cell.step_time_s or 0.0) > (foreseen.held_out_s or 0.0) for cell in cells)
    if slower and all(map(is_core_bound, cells)):
        told.append(f"cores busy for {100 * BUSY:.0f} % or more, which no link tells")
    if slower and statistics.median(stolen_of(cell) or 0.0 for cell in cells) >= TOO_MUCH:
        told.append(f"the host took {100 * TOO_MUCH:.0f} % or more of the cores' time")
    return ", ".join(told)


def _of_other_plan(foreseen: ForecastCell, cells: Sequence[Cell]) -> list[Cell]:
    """Those whose plans differ by more than the rounding of what decided about them.

    One whose own prediction is the forecast's tells no other step than it.
    """
    alike, own_s = {"", foreseen.plan_digest}, foreseen.held_out_s or 0.0
    others = [cell for cell in cells if cell.plan_digest not in alike]
    others = [c for c in others if not math.isclose(c.predicted_step_time_s or -1.0, own_s)]
    return others if foreseen.plan_digest else []


def scores(rows: Sequence[ForecastRow]) -> list[ForecastScore]:
    """All cells, each class of plan, each backend, and each class on each backend."""
    families: Sequence[Callable[[ForecastRow], tuple[str, str]]] = (
        lambda row: ("", ""),
        lambda row: (row.plan_class, ""),
        lambda row: ("", row.backend),
        lambda row: (row.plan_class, row.backend),
    )
    found: dict[tuple[str, str], list[ForecastRow]] = {}
    for family in families:
        of_family: dict[tuple[str, str], list[ForecastRow]] = {}
        for row in rows:
            of_family.setdefault(family(row), []).append(row)
        found |= of_family
    return [_score(*names, of_group) for names, of_group in found.items()]


def _score(plan_class: str, backend: str, rows: Sequence[ForecastRow]) -> ForecastScore:
    errors = [abs(row.held_out_s / row.measured_s - 1) for row in rows]
    nulls = [abs(row.null_s / row.measured_s - 1) for row in rows if row.null_s]
    misses = [pair for row in rows if (pair := _misses(row)) is not None]
    spreads = [row.spread for row in rows if row.spread is not None]
    low, high = _interval(misses)
    return ForecastScore(
        plan_class=plan_class,
        backend=backend,
        num_cells=len(rows),
        median=statistics.median(errors),
        p90=quantile(errors, 0.9),
        null_median=statistics.median(nulls) if nulls else None,
        null_p90=quantile(nulls, 0.9) if nulls else None,
        skill=skill(misses),
        skill_low=low,
        skill_high=high,
        spread=statistics.median(spreads) if spreads else None,
    )


def _misses(row: ForecastRow) -> tuple[float, float] | None:
    """|ln(held-out / measured)| and the same of null; None without null."""
    if not row.null_s:
        return None
    held_out = abs(math.log(row.held_out_s / row.measured_s))
    return held_out, abs(math.log(row.null_s / row.measured_s))


def skill(misses: Sequence[tuple[float, float]]) -> float | None:
    """1 - sum |ln(held-out / measured)| / sum |ln(null / measured)|; None where null is exact.

    Args:
        misses: the two absolute log ratios of each cell.

    Example:
        >>> skill([(0.1, 0.2), (0.0, 0.2)]), skill([])
        (0.75, None)

    Reference:
        Murphy, 1988, Monthly Weather Review (skill score). Departs: absolute log ratios instead of
        squares, so that one cell does not decide.
    """
    null = sum(of_null for _, of_null in misses)
    return None if null == 0 else 1 - sum(held_out for held_out, _ in misses) / null


def _interval(misses: Sequence[tuple[float, float]]) -> tuple[float | None, float | None]:
    """95 % percentile bootstrap over cells."""
    if len(misses) < LEAST_CELLS:
        return None, None
    draw = random.Random(0)
    drawn = [skill(draw.choices(misses, k=len(misses))) for _ in range(RESAMPLES)]
    known = [each for each in drawn if each is not None]
    return (quantile(known, 0.025), quantile(known, 0.975)) if known else (None, None)


def describe(rows: Sequence[ForecastRow], found: Sequence[ForecastScore]) -> list[str]:
    """Lines for people: the formulas, one line for each group, and the misses."""
    if not rows:
        return []
    lines = [FORMULA, *(_line(score) for score in found)]
    return lines + [
        f"missed by more than {MISS_SPREADS:g} times the cell's own spread: {row.name}: "
        f"{_percent(row.held_out_s / row.measured_s - 1, '+')}, spread {_percent(row.spread)}: "
        + (f"explained: {row.why}" if row.why else "unexplained")
        for row in rows
        if row.spread is not None and _is_miss(row.held_out_s, row.measured_s, row.spread)
    ]


def _is_miss(held_out_s: float, measured_s: float, spread: float) -> bool:
    return abs(math.log(held_out_s / measured_s)) > MISS_SPREADS * spread


def _line(score: ForecastScore) -> str:
    what = ", ".join(filter(None, (score.plan_class, score.backend))) or "all cells"
    text = (
        f"forecast of {what} ({score.num_cells}): held-out {_percent(score.median)} in the median, "
        f"{_percent(score.p90)} at the 90th percentile"
    )
    if score.null_median is not None and score.null_p90 is not None:
        text += f"; null {_percent(score.null_median)}, {_percent(score.null_p90)}"
    if score.skill is not None:
        text += f"; skill {score.skill:.2f}"
    if score.skill_low is not None and score.skill_high is not None:
        text += f" [{score.skill_low:.2f}, {score.skill_high:.2f}]"
    spread = "one run each" if score.spread is None else f"spread {_percent(score.spread)}"
    return f"{text}; {spread}"


def _percent(share: float, sign: str = "") -> str:
    return f"{share:{sign}.1%}".replace("%", " %")


def _listed(names: Sequence[str]) -> str:
    return "; ".join(dict.fromkeys(names))
