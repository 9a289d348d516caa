"""One table for each question of a setting: backends, schedulers, compressors, memory, scaling."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from testbed.base.axes import BACKENDS, COMPRESSORS, MEMORY, SCHEDULERS
from testbed.base.units import rounded
from testbed.records.answer import Answer
from testbed.records.report import Report, ReportCell
from testbed.records.text import rate_text
from testbed.reporting.answer import (
    Cells,
    comparison,
    methods_of,
    peak_bytes,
    step_s,
    why_not_ranked,
)
from testbed.reporting.answer_text import SURE_RUNS, heading_of
from testbed.reporting.naming import marks_text, part_of, short_text
from testbed.reporting.prediction import kinds_text
from testbed.reporting.ratios import alike_text, name_of
from testbed.reporting.setting import Setting, differing
from testbed.reporting.table import MOST_COLUMNS, Column, Table, table_of
from testbed.reporting.work import apart_from_memory, compresses, is_upper_bound, undilated
from testbed.statistics.runs import Comparison

_MARKS = {
    "tied": "=",
    "unstable": "u",
    "depends on dilation": "d",
    "dilation not checked": "d",
    "cores busy": "c",
}
_LEGEND = {
    "*": "* shortest predicted",
    "=": "= tied with the fastest",
    "u": "u unstable (spread of 3 % or more), not ranked",
    "d": "d depends on dilation or unchecked, not ranked",
    "c": "c cores busy, not ranked",
}


def tables_of(report: Report, setting: Setting, answer: Answer) -> list[Table]:
    """The tables of a setting, those that have something to compare."""
    cells = {place: undilated(report.cells[place]) for place in setting.places}
    methods = methods_of({place: report.cells[place] for place in setting.places})
    marks = _marks(methods)
    bounds = {p: c for p, c in cells.items() if is_upper_bound(c) and p not in methods}
    plain = {p: cells[p] for p in methods}
    found = [
        *_methods(plain, _one_bound(bounds, plain), marks, answer, setting),
        *_compressors(report, cells, plain, setting),
        *_memory(cells),
    ]
    return [table for table in found if len(table.rows) > 1]


def _marks(methods: Cells) -> dict[int, str]:
    """What the short tables say of a method's rank."""
    if not methods:
        return {}
    found: Comparison = comparison(methods)
    first = next(iter(methods))
    tied = found.tied.get(str(first), ())
    marks = {}
    for place, cell in methods.items():
        why = why_not_ranked(cell, found, place)
        word = "unstable" if why.startswith("unstable") else why
        is_tied = str(place) in tied or (place == first and tied)
        marks[place] = "=" if is_tied else _MARKS.get(word, "")
    return marks


def step_text(cell: ReportCell) -> str:
    """The step in ms with its interval, or with the faster and the slower of two runs."""
    if cell.step_time_s is None:
        return ""
    text = rounded(1e3 * cell.step_time_s)
    sure = len(cell.run_medians_s) >= SURE_RUNS
    low, high = cell.step_time_low_s, cell.step_time_high_s
    if not sure:
        low, high = cell.step_time_smallest_s, cell.step_time_largest_s
    if len(cell.run_medians_s) > 1 and low is not None and high is not None:
        ends = (rounded(1e3 * low), rounded(1e3 * high))
        text += f" [{ends[0]}, {ends[1]}]" if sure else f" ({ends[0]}-{ends[1]})"
    return text


def _marked(text: str, mark: str, marks: Iterable[str]) -> str:
    """A figure with its mark, or with room for one where others of its column have one."""
    return f"{text} {mark or ' '}" if any(marks) else text


def _range_heading(cells: Cells) -> str:
    counts = {len(cell.run_medians_s) for cell in cells.values()}
    sure = any(n >= SURE_RUNS for n in counts)
    return "step ms [95 %]" if sure else "step ms (min-max)" if 2 in counts else "step ms"


def _above(cell: ReportCell, other: ReportCell | None) -> str:
    """By how much its step is longer, in %."""
    if other is None or other.step_time_s is None or cell.step_time_s is None:
        return ""
    share = cell.step_time_s / other.step_time_s - 1
    return "0" if share == 0 else f"{'+' if share > 0 else ''}{rounded(100 * share)}"


def _legend(marks: Mapping[int, str], places: Iterable[int], foreseen: Cells) -> str:
    """What the marks of some rows mean; of `foreseen` the shortest prediction is marked."""
    used = {marks[place] for place in places}
    known = {p: c.predicted_step_time_s for p, c in foreseen.items() if c.predicted_step_time_s}
    if any(known.get(place) == min(known.values()) for place in places if known):
        used.add("*")
    return "; ".join(words for mark, words in _LEGEND.items() if mark in used)


def ms_text(figure: float | None) -> str:
    """Seconds in milliseconds; empty where they are not known."""
    return "" if figure is None else rounded(1e3 * figure)


def _mb(figure: float | None) -> str:
    return "" if figure is None else rounded(1e-6 * figure)


def _one_bound(bounds: Cells, methods: Cells) -> Cells:
    fastest = min(bounds, key=lambda place: step_s(bounds[place]), default=None)
    return {} if fastest is None or not methods else {fastest: bounds[fastest]}


def _method_columns(
    cells: Cells,
    marks: Mapping[int, str],
    best: ReportCell,
    usual: ReportCell | None,
    setting: Setting,
) -> list[Column]:
    def scheduler(place: int) -> str:
        framework = name_of(cells[place]) == part_of(cells[place], BACKENDS)
        if is_upper_bound(cells[place]):
            return ""
        name = "its own" if framework else part_of(cells[place], SCHEDULERS)
        return setting.row(name, place)

    def backend(place: int) -> str:
        name = short_text(part_of(cells[place], BACKENDS))
        return f"{name} (bound)" if is_upper_bound(cells[place]) else name

    def step(place: int) -> str:
        return _marked(step_text(cells[place]), marks.get(place, ""), marks.values())

    return [
        Column("backend", backend, numeric=False),
        Column("scheduler", scheduler, numeric=False),
        Column(_range_heading(cells), step),
        Column("vs best %", lambda p: _above(cells[p], best)),
        Column("vs usual %", lambda p: _above(cells[p], usual)),
        Column("pred. ms", lambda p: _forecast(cells, p)),
        Column("exposed ms", lambda p: ms_text(cells[p].exposed_comm_s)),
        Column("MB/step", lambda p: _mb(cells[p].wire_bytes_per_step)),
    ]


def _methods(
    cells: Cells,
    bound: Cells,
    marks: Mapping[int, str],
    answer: Answer,
    setting: Setting,
) -> list[Table]:
    """Each backend with its fastest scheduler; then each scheduler on each backend."""
    if not cells:
        return []
    places = list(cells)
    fastest: dict[str, int] = {}
    for place in places:
        fastest.setdefault(part_of(cells[place], BACKENDS), place)
    one_each = len(fastest) == len(places)
    best = cells[places[0]]
    usual = cells.get(-1 if answer.usual is None else answer.usual.place)
    every = {**bound, **cells}
    columns = _method_columns(every, marks, best, usual, setting)
    if answer.usual is not None:
        usual_name = heading_of(answer.usual.name)
        columns = [replace(c, heading=c.heading.replace("usual", usual_name)) for c in columns]
    if len(fastest) == 1:
        below = _below(cells, marks, places)
        return [table_of("Schedulers", columns, [*bound, *places], below)]
    title = "Backends" if one_each else "Backends, each with its fastest scheduler"
    shown = list(fastest.values())
    below = "; ".join(
        filter(None, [_below(cells, marks, shown), alike_text(cells, comparison(cells))])
    )
    tables = [table_of(title, columns, [*bound, *shown], below)]
    if one_each:
        return tables
    planned = [p for p in places if name_of(cells[p]) != part_of(cells[p], BACKENDS)]
    if len({part_of(cells[p], BACKENDS) for p in planned}) == 1:
        return [*tables, table_of("Schedulers", columns, planned, _below(cells, marks, planned))]
    return [*tables, _matrix(cells, marks, setting)]


def _below(cells: Cells, marks: Mapping[int, str], places: Sequence[int]) -> str:
    """What the marks of some rows mean, and what is to be known of their methods and figures."""
    shown = [cells[place] for place in places]
    told = (_legend(marks, places, cells), marks_text(shown), kinds_text(shown))
    return "; ".join(filter(None, told))


def _matrix(cells: Cells, marks: Mapping[int, str], setting: Setting) -> Table:
    """Rows of schedulers, a column for each backend that carries out plans."""
    grid: dict[str, dict[str, int]] = {}
    for place, cell in cells.items():
        if name_of(cell) != part_of(cell, BACKENDS):
            row = grid.setdefault(setting.row(part_of(cell, SCHEDULERS), place), {})
            row.setdefault(part_of(cell, BACKENDS), place)
    backends = list(dict.fromkeys(backend for row in grid.values() for backend in row))
    forecast = 2 * len(backends) < MOST_COLUMNS and any(
        cells[place].predicted_step_time_s for row in grid.values() for place in row.values()
    )
    columns = [Column("scheduler", short_text, numeric=False)]
    for backend in backends[: MOST_COLUMNS - 1]:
        columns.append(_of_backend(backend, cells, grid, marks))
        if forecast:
            columns.append(_predicted(backend, cells, grid))
    used = [place for row in grid.values() for place in row.values()]
    title = "Schedulers on each backend, step in ms" + (" and as predicted" if forecast else "")
    return table_of(title, columns, list(grid), _below(cells, marks, used))


def _of_backend(
    backend: str, cells: Cells, grid: Mapping[str, Mapping[str, int]], marks: Mapping[int, str]
) -> Column:
    """The steps on a backend; a row stands for a scheduler, or a compressor."""

    def text(row: str) -> str:
        place = grid[row].get(backend)
        if place is None:
            return ""
        return _marked(ms_text(cells[place].step_time_s), marks[place], marks.values())

    return Column(f"{short_text(backend)} ms", text)


def _predicted(backend: str, cells: Cells, grid: Mapping[str, Mapping[str, int]]) -> Column:
    def text(row: str) -> str:
        place = grid[row].get(backend)
        return "" if place is None else _forecast(cells, place)

    return Column("pred. ms", text)


def _forecast(cells: Cells, place: int) -> str:
    """The predicted step; the shortest of all methods is marked."""
    known = {p: c.predicted_step_time_s for p, c in cells.items() if c.predicted_step_time_s}
    if place not in known:
        return ""
    return _marked(ms_text(known[place]), "*" if known[place] == min(known.values()) else "", "*")


def _what_compresses(cell: ReportCell) -> str:
    """The compressor, or the framework that makes messages smaller by itself."""
    by_framework = compresses(cell) and COMPRESSORS.is_default(cell.config)
    return part_of(cell, BACKENDS) if by_framework else cell.config.compressor


def _compressors(report: Report, cells: Cells, dense: Cells, setting: Setting) -> list[Table]:
    """Each compressor beside dense messages, with its fastest scheduler.

    On several backends: a column for each, the other figures are of the fastest.
    """
    lossy = [
        p for p, c in cells.items() if compresses(c) and c.step_time_s and not is_upper_bound(c)
    ]
    if not lossy:
        return []
    grid: dict[str, dict[str, int]] = {}
    for place in sorted({*lossy, *dense}, key=lambda place: cells[place].step_time_s or 0.0):
        row = grid.setdefault(setting.row(_what_compresses(cells[place]), place), {})
        row.setdefault(part_of(cells[place], BACKENDS), place)
    used = [place for row in grid.values() for place in row.values()]
    marks = {p: _MARKS.get(cells[p].rank_note, "").strip("=") for p in used}
    backends = list(dict.fromkeys(backend for row in grid.values() for backend in row))
    rates = {verdict.place: verdict for verdict in report.compression}

    def first(row: str) -> int:
        return next(iter(grid[row].values()))

    def best(row: str) -> ReportCell:
        return cells[first(row)]

    def plain(row: str) -> ReportCell | None:
        alike = setting.row(COMPRESSORS.default, first(row))
        rows = grid.get(alike) or grid.get(COMPRESSORS.default) or {}
        own = part_of(best(row), BACKENDS)
        if _what_compresses(best(row)) == own:  # a framework's hook: beside the framework without
            own = next((b for b in rows if b.partition(":")[0] == own.partition(":")[0]), own)
        return cells[rows[own]] if own in rows else None

    def codec(row: str) -> str:
        found = best(row).compression
        return "" if found is None else ms_text(found.encode_s + found.decode_s)

    def sent(row: str) -> str:
        found = best(row).compression
        return _mb(best(row).wire_bytes_per_step if found is None else found.sent_bytes)

    def pays(row: str) -> str:
        found = rates.get(first(row))
        if found is None:
            return ""
        rate = found.below_bits_per_s
        return found.pays if rate is None else f"< {rate_text(rate)}"

    def accuracy(row: str) -> str:
        known = best(row).test_accuracy
        return "" if known is None else rounded(100 * known)

    def step(row: str) -> str:
        (place,) = grid[row].values()
        return _marked(step_text(cells[place]), marks[place], marks.values())

    one = len(backends) == 1
    steps = [_of_backend(backend, cells, grid, marks) for backend in backends]
    columns = [
        Column("compressor", str, numeric=False),
        Column("scheduler", lambda row: part_of(best(row), SCHEDULERS), numeric=False),
        *([Column(_range_heading(cells), step)] if one else steps[:4]),
        Column("vs dense %", lambda row: _above(best(row), plain(row))),
        Column("MB sent", sent),
        Column("accuracy %", accuracy),
        Column("should pay", pays),
        Column("codec ms", codec),
    ]
    title = "Compressors beside dense messages"
    title += f" on {backends[0]}" if one else "; from vs dense on, of the fastest backend"
    legend = [_legend(marks, used, {}), "should pay: at or below which rate, as predicted"]
    return [table_of(title, columns, list(grid), "; ".join(filter(None, legend)))]


def _memory(cells: Cells) -> list[Table]:
    """Each memory strategy, the least peak first."""
    known = {p: peak for p, c in cells.items() if (peak := peak_bytes(c)) and c.step_time_s}
    if len({cells[place].config.memory for place in known}) < 2:
        return []
    places = sorted(known, key=lambda place: (known[place], cells[place].step_time_s or 0.0))
    plain = {
        apart_from_memory(cells[place]): cells[place]
        for place in reversed(places)
        if cells[place].config.memory == MEMORY.default
    }

    def of_memory(name: str) -> Callable[[int], str]:
        return lambda place: _mb(getattr(cells[place].memory, name))

    def config(name: str) -> Callable[[int], str]:
        return lambda place: str(getattr(cells[place].config, name))

    differs = [name for name in differing([cells[p].config for p in places]) if name != "budget_mb"]
    columns = [
        Column("memory", config("memory"), numeric=False),
        Column("backend", lambda p: short_text(part_of(cells[p], BACKENDS)), numeric=False),
        Column("compressor", config("compressor"), numeric=False),
        *(Column(name, config(name), numeric=False) for name in differs[:1]),
        Column("peak MB", of_memory("measured_bytes")),
        Column("pred. MB", of_memory("predicted_bytes")),
        Column("moved MB", of_memory("moved_bytes")),
        Column("step ms", lambda p: ms_text(cells[p].step_time_s)),
        Column("vs none %", lambda p: _above(cells[p], plain.get(apart_from_memory(cells[p])))),
    ]
    title = "Memory strategies, peak of live storages of rank 0"
    return [table_of(title, columns, places, "moved: to the host and back in each step")]
