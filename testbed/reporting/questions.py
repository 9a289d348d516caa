"""One table for each question of a setting: backends, schedulers, compressors, memory, scaling."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from testbed.base.axes import BACKENDS, COMPRESSORS, SCHEDULERS
from testbed.records.answer import Answer
from testbed.records.report import CompressorBreakEven, Report, ReportCell
from testbed.records.text import rate_text
from testbed.reporting.answer import (
    SURE_RUNS,
    Cells,
    comparison,
    methods_of,
    peak_bytes,
    step_s,
    why_not_ranked,
)
from testbed.reporting.columns import rounded
from testbed.reporting.naming import part_of, short_text
from testbed.reporting.ranking import is_compared
from testbed.reporting.ratios import name_of
from testbed.reporting.setting import Setting
from testbed.reporting.work import apart_from_memory, compresses, is_upper_bound, undilated
from testbed.statistics.runs import Comparison

MOST_COLUMNS = 8
_MATRIX_BACKENDS = 6
_MARKS = {
    "tied": "=",
    "unstable": "u",
    "depends on dilation": "d",
    "dilation not checked": "d",
}
_LEGEND = {
    "=": "= tied with the fastest",
    "u": "u unstable (runs spread by 3 % or more), not ranked",
    "d": "d depends on dilation, or not checked, not ranked",
}


@dataclass(frozen=True)
class Table:
    """A table for people.

    Attributes:
        title: the question, and what is alike in all rows.
        headings: at most eight, with units.
        numeric: which columns are figures.
        rows: texts.
        below: what its marks mean.
    """

    title: str
    headings: tuple[str, ...]
    numeric: tuple[bool, ...]
    rows: tuple[tuple[str, ...], ...]
    below: str = ""


@dataclass(frozen=True)
class _Column:
    heading: str
    text: Callable[[int], str]  # of a place
    numeric: bool = True


def tables_of(report: Report, setting: Setting, answer: Answer) -> list[Table]:
    """The tables of a setting, those that have something to compare."""
    cells = {place: undilated(report.cells[place]) for place in setting.places}
    methods = methods_of({place: report.cells[place] for place in setting.places})
    marks = _marks(methods)
    bounds = {p: c for p, c in cells.items() if is_upper_bound(c) and p not in methods}
    plain = {p: cells[p] for p in methods}
    found = [
        *_methods(plain, _one_bound(bounds, plain), marks, answer),
        *_compressors(report, cells, plain, setting),
        *_memory(cells, setting),
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


def _legend(marks: Sequence[str]) -> str:
    return "; ".join(words for mark, words in _LEGEND.items() if mark in marks)


def _ms(figure: float | None) -> str:
    return "" if figure is None else rounded(1e3 * figure)


def _mb(figure: float | None) -> str:
    return "" if figure is None else rounded(1e-6 * figure)


def _one_bound(bounds: Cells, methods: Cells) -> Cells:
    fastest = min(bounds, key=lambda place: step_s(bounds[place]), default=None)
    return {} if fastest is None or not methods else {fastest: bounds[fastest]}


def _table(title: str, columns: Sequence[_Column], places: Sequence[int], below: str) -> Table:
    """Columns that hold something; words that are alike in all rows move to the title."""
    constant = []
    kept = []
    for column in columns:
        texts = [column.text(place) for place in places]
        if not any(texts):
            continue
        if not column.numeric and len(set(texts)) == 1 and len(places) > 1:
            constant.append(f"{column.heading} {texts[0]}")
        else:
            kept.append(column)
    kept = kept[:MOST_COLUMNS]
    return Table(
        title=", ".join([title, *constant]),
        headings=tuple(column.heading for column in kept),
        numeric=tuple(column.numeric for column in kept),
        rows=tuple(tuple(column.text(place) for column in kept) for place in places),
        below=below,
    )


def _method_columns(
    cells: Cells, marks: Mapping[int, str], best: ReportCell, usual: ReportCell | None
) -> list[_Column]:
    def scheduler(place: int) -> str:
        framework = name_of(cells[place]) == part_of(cells[place], BACKENDS)
        if is_upper_bound(cells[place]):
            return "(the bound)"
        return "its own" if framework else part_of(cells[place], SCHEDULERS)

    def step(place: int) -> str:
        return _marked(step_text(cells[place]), marks.get(place, ""), marks.values())

    return [
        _Column("backend", lambda p: short_text(part_of(cells[p], BACKENDS)), numeric=False),
        _Column("scheduler", scheduler, numeric=False),
        _Column(_range_heading(cells), step),
        _Column("vs best %", lambda p: _above(cells[p], best)),
        _Column("vs usual %", lambda p: _above(cells[p], usual)),
        _Column("predicted ms", lambda p: _ms(cells[p].predicted_step_time_s)),
        _Column("exposed ms", lambda p: _ms(cells[p].exposed_comm_s)),
        _Column("MB/step", lambda p: _mb(cells[p].wire_bytes_per_step)),
    ]


def _methods(cells: Cells, bound: Cells, marks: Mapping[int, str], answer: Answer) -> list[Table]:
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
    columns = _method_columns(every, marks, best, usual)
    if answer.usual is not None:
        columns = [
            replace(c, heading=c.heading.replace("usual", short_text(answer.usual.name)))
            for c in columns
        ]
    if len(fastest) == 1:
        return [_table("Schedulers", columns, [*bound, *places], _legend([*marks.values()]))]
    title = "Backends" if one_each else "Backends, each with its fastest scheduler"
    shown = list(fastest.values())
    tables = [_table(title, columns, [*bound, *shown], _legend([marks[p] for p in shown]))]
    return tables if one_each else [*tables, _matrix(cells, marks)]


def _matrix(cells: Cells, marks: Mapping[int, str]) -> Table:
    """Rows of schedulers, a column for each backend that carries out plans."""
    grid: dict[str, dict[str, int]] = {}
    for place, cell in cells.items():
        if name_of(cell) != part_of(cell, BACKENDS):
            row = grid.setdefault(part_of(cell, SCHEDULERS), {})
            row.setdefault(part_of(cell, BACKENDS), place)
    backends = list(dict.fromkeys(backend for row in grid.values() for backend in row))
    backends = backends[:_MATRIX_BACKENDS]
    forecast = 2 * len(backends) < MOST_COLUMNS
    headings = ["scheduler"]
    for backend in backends:
        headings += [f"{short_text(backend)} ms", *(["pred."] if forecast else [])]
    rows = []
    for scheduler, row in grid.items():
        texts = [short_text(scheduler)]
        for backend in backends:
            own = row.get(backend)
            texts.append(
                ""
                if own is None
                else _marked(_ms(cells[own].step_time_s), marks[own], marks.values())
            )
            if forecast:
                texts.append("" if own is None else _ms(cells[own].predicted_step_time_s))
        rows.append(tuple(texts))
    used = [marks[place] for row in grid.values() for place in row.values()]
    title = "Schedulers on each backend, step in ms" + (" and as predicted" if forecast else "")
    numeric = (False, *[True] * (len(headings) - 1))
    return Table(title, tuple(headings), numeric, tuple(rows), _legend(used))


def _compressors(report: Report, cells: Cells, dense: Cells, setting: Setting) -> list[Table]:
    """Each compressor beside dense messages on the same backend, its fastest scheduler counting."""
    lossy = {p: c for p, c in cells.items() if compresses(c) and not is_upper_bound(c)}
    lossy = {p: c for p, c in lossy.items() if c.status == "ok" and c.step_time_s}
    if not lossy:
        return []
    fastest: dict[tuple[str, str], int] = {}
    ordered = sorted([*lossy, *dense], key=lambda place: cells[place].step_time_s or 0.0)
    for place in ordered:
        backend = part_of(cells[place], BACKENDS)
        fastest.setdefault((backend, cells[place].config.compressor), place)
    below = {
        (v.workload, v.backend, v.num_workers, v.scheduler, v.compressor): v
        for v in report.compression
    }

    def plain(place: int) -> ReportCell | None:
        own = fastest.get((part_of(cells[place], BACKENDS), COMPRESSORS.default))
        return None if own is None else cells[own]

    def codec_s(place: int) -> float | None:
        found = cells[place].compression
        return None if found is None else found.encode_s + found.decode_s

    def sent(place: int) -> float | None:
        found = cells[place].compression
        return cells[place].wire_bytes_per_step if found is None else found.sent_bytes

    def pays(place: int) -> str:
        c = cells[place]
        found = below.get((c.workload, c.backend, c.num_workers, c.scheduler, c.config.compressor))
        if found is None:
            return ""
        rate = found.below_bits_per_s
        return found.pays if rate is None else f"< {rate_text(rate)}"

    def accuracy(place: int) -> str:
        known = cells[place].test_accuracy
        return "" if known is None else rounded(100 * known)

    places = list(fastest.values())
    marks = {p: _MARKS.get(cells[p].rank_note, "").strip("=") for p in places}

    def step(place: int) -> str:
        return _marked(step_text(cells[place]), marks[place], marks.values())

    columns = [
        _Column("backend", lambda p: short_text(part_of(cells[p], BACKENDS)), numeric=False),
        _Column("compressor", lambda p: cells[p].config.compressor, numeric=False),
        _Column("scheduler", lambda p: short_text(part_of(cells[p], SCHEDULERS)), numeric=False),
        _Column(_range_heading(cells), step),
        _Column("vs dense %", lambda p: _above(cells[p], plain(p))),
        _Column("codec ms", lambda p: _ms(codec_s(p))),
        _Column("MB sent", lambda p: _mb(sent(p))),
        _Column("accuracy %", accuracy),
        _Column("should pay", pays),
    ]
    legend = "should pay: predicted, at or below which rate; codec: encoding and decoding"
    return [_table("Compressors beside dense messages", columns, places, legend)]


def _memory(cells: Cells, setting: Setting) -> list[Table]:
    """Each memory strategy, the least peak first."""
    known = {p: peak for p, c in cells.items() if (peak := peak_bytes(c)) and c.status == "ok"}
    if len({cells[place].config.memory for place in known}) < 2:
        return []
    places = sorted(known, key=lambda place: (known[place], cells[place].step_time_s or 0.0))

    def plain(place: int) -> ReportCell | None:
        alike = [
            cells[p]
            for p in places
            if cells[p].config.memory == "none"
            and apart_from_memory(cells[p]) == apart_from_memory(cells[place])
        ]
        return alike[0] if alike else None

    def of_memory(name: str) -> Callable[[int], str]:
        return lambda place: _mb(getattr(cells[place].memory, name))

    def words(place: int) -> str:
        return (
            setting.names[place].rpartition(" (")[2].rstrip(")")
            if "(" in setting.names[place]
            else ""
        )

    columns = [
        _Column("memory", lambda p: cells[p].config.memory, numeric=False),
        _Column("backend", lambda p: short_text(part_of(cells[p], BACKENDS)), numeric=False),
        _Column("compressor", lambda p: cells[p].config.compressor, numeric=False),
        _Column("setting", words, numeric=False),
        _Column("peak MB", of_memory("measured_bytes")),
        _Column("pred. MB", of_memory("predicted_bytes")),
        _Column("moved MB", of_memory("moved_bytes")),
        _Column("step ms", lambda p: _ms(cells[p].step_time_s)),
        _Column("vs none %", lambda p: _above(cells[p], plain(p))),
    ]
    title = "Memory strategies: peak of live storages of rank 0"
    return [_table(title, columns, places, "moved: to the host and back, and lies there meanwhile")]


def scaling(cells: Sequence[ReportCell], settings: Sequence[Setting]) -> list[Table]:
    """The step of each method at each number of workers, where there are several."""
    groups: dict[tuple[str, ...], dict[int, Setting]] = {}
    for setting in settings:
        first = cells[setting.places[0]]
        rest = [p for p in setting.parts[2:] if not p.startswith("nodes=")]
        groups.setdefault((first.source, setting.parts[0], *rest), {})[first.num_workers] = setting
    tables = []
    for (_, *alike), by_workers in groups.items():
        counts = sorted(by_workers)[-(MOST_COLUMNS - 1) :]
        if len(counts) < 2:
            continue
        steps: dict[str, dict[int, float]] = {}
        for count in counts:
            for place in by_workers[count].places:
                own = cells[place]
                if own.step_time_s and (is_compared(own) or is_upper_bound(own)):
                    name = by_workers[count].names[place]
                    steps.setdefault(name, {})[count] = step_s(own)
        rows = sorted(steps.items(), key=lambda row: min(row[1].get(n, 1e9) for n in counts[-1:]))
        tables.append(
            Table(
                title=f"Scaling of {', '.join(alike)}: step in ms by workers",
                headings=("method", *(f"{n} workers" for n in counts)),
                numeric=(False, *[True] * len(counts)),
                rows=tuple((name, *(_ms(times.get(n)) for n in counts)) for name, times in rows),
            )
        )
    return tables


def break_even_table(found: Sequence[CompressorBreakEven]) -> list[Table]:
    """From which rate down each compressor gained, and should have."""

    def rate(bits_per_s: float | None) -> str:
        return "no single rate" if bits_per_s is None else rate_text(bits_per_s)

    def error(each: CompressorBreakEven) -> str:
        if each.measured_bits_per_s is None or each.predicted_bits_per_s is None:
            return ""
        return rounded(100 * (each.predicted_bits_per_s / each.measured_bits_per_s - 1))

    rows = [
        (
            short_text(each.workload),
            f"{each.backend}, {each.num_workers} workers",
            each.compressor,
            f"{rate_text(each.rates_bits_per_s[0])} - {rate_text(each.rates_bits_per_s[1])}",
            rate(each.measured_bits_per_s),
            rate(each.predicted_bits_per_s),
            error(each),
        )
        for each in found
    ]
    headings = ("workload", "on", "compressor", "rates run", "pays below", "predicted", "error %")
    numeric = (False, False, False, False, True, True, True)
    return (
        [Table("Compressors: the rate below which they pay", headings, numeric, tuple(rows))]
        if rows
        else []
    )
