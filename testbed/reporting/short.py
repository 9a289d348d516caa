"""The report that a person reads first: answers, a table for each question, notes once each."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from testbed.base.units import rounded
from testbed.prediction.break_even import Pays
from testbed.records.answer import Answer, Beside
from testbed.records.report import CompressorBreakEven, Report, ReportCell
from testbed.records.text import rate_text
from testbed.reporting.answer import step_s
from testbed.reporting.answer_text import WIDTH, faster_text, heading_of
from testbed.reporting.compression import PAYS_TEXTS
from testbed.reporting.formats import latex_table, latex_text, markdown_row, markdown_text
from testbed.reporting.naming import short_text
from testbed.reporting.prediction import describe_errors
from testbed.reporting.questions import ms_text, tables_of
from testbed.reporting.ranking import is_compared
from testbed.reporting.setting import Setting, full_names, method_names, settings_of
from testbed.reporting.table import MOST_COLUMNS, Column, Table, table_of, table_text
from testbed.reporting.work import is_upper_bound, same_work
from testbed.sweeping.progress import last_line

_NOTE_LINES = 3
NO_REASON = "no reason recorded"
MORE = "everything, for each cell: --full; all columns for programs: --format csv or json"


@dataclass(frozen=True)
class Section:
    """A setting.

    Attributes:
        heading: what is alike in its cells.
        lines: the answer; at most three.
        tables: one for each question.
    """

    heading: str
    lines: tuple[str, ...]
    tables: tuple[Table, ...]


@dataclass(frozen=True)
class Short:
    """The short report.

    Attributes:
        summary: with several settings: the answer of each in a row; what lies between settings.
        sections: one for each setting.
        notes: what the reader has to know, once each.
    """

    summary: tuple[Table, ...]
    sections: tuple[Section, ...]
    notes: tuple[str, ...]


def shorten(report: Report) -> Short:
    """The short report of a report, as `make_report` made it."""
    settings = settings_of(report.cells)
    between = [*_scaling(report.cells, settings), *_break_evens(report.break_evens)]
    sections = [
        Section(answer.setting, tuple(answer.lines), tuple(tables_of(report, setting, answer)))
        for setting, answer in zip(settings, report.answers, strict=True)
    ]
    several = [_summary(settings, report.answers)] if len(settings) > 1 else []
    return Short(tuple([*several, *between]), tuple(sections), tuple(_notes(report)))


def _summary(settings: Sequence[Setting], answers: Sequence[Answer]) -> Table:
    """The answer of each setting in a row; what they have in common in the title."""
    common = [part for part in settings[0].parts if all(part in s.parts for s in settings)]

    def gain(beside: Beside | None, verdict: str) -> str:
        if beside is None:
            return ""
        doubt = " ?" if verdict in ("fastest", "tied") else ""  # else the verdict tells it
        sure = {True: "", False: " ns", None: doubt}[beside.differs]
        return f"{rounded(100 * beside.gain)}{sure}"

    def above(answer: Answer) -> str:
        if not answer.bound_s or not answer.step_time_s:
            return ""
        return rounded(100 * (answer.step_time_s / answer.bound_s - 1))

    def lossy(answer: Answer) -> str:
        if answer.compressed is None:
            return "-"  # told, so that a single lossy method is not taken for every setting's
        return f"{answer.compressed.name.rpartition(' with ')[2]} {faster_text(answer.compressed)}"

    def own(setting: Setting) -> str:
        return ", ".join(part for part in setting.parts if part not in common) or "-"

    any_lossy = any(answer.compressed is not None for answer in answers)
    names = {answer.usual.name for answer in answers if answer.usual is not None}
    usual = heading_of(names.pop()) if len(names) == 1 else "usual"
    said = ["next"] * any(answer.next is not None for answer in answers)
    said += [usual] * any(answer.usual is not None for answer in answers)
    gains = [gain(beside, a.verdict) for a in answers for beside in (a.next, a.usual)]
    doubts = ", ?: not proven" if any(text.endswith("?") for text in gains) else ""
    columns = [
        Column("setting", lambda row: own(row[0]), numeric=False),
        Column("fastest", lambda row: " = ".join(row[1].best) or "-", numeric=False),
        Column(
            "step ms", lambda row: rounded(1e3 * (row[1].step_time_s or 0)) if row[1].best else ""
        ),
        Column("next +%", lambda row: gain(row[1].next, row[1].verdict)),
        Column(f"{usual} +%", lambda row: gain(row[1].usual, row[1].verdict)),
        Column("over bound %", lambda row: above(row[1])),
        *([Column("fastest lossy", lambda row: lossy(row[1]), numeric=False)] if any_lossy else []),
        Column("verdict", lambda row: row[1].verdict, numeric=False),
    ]
    return table_of(
        ", ".join([f"{len(settings)} settings", *common]),
        columns,
        list(zip(settings, answers, strict=True)),
        f"{' and '.join(said)} +%: by how much its step is longer (ns: not significantly{doubts})"
        if said
        else "",
    )


def _scaling(cells: Sequence[ReportCell], settings: Sequence[Setting]) -> list[Table]:
    """The step of each method at each number of workers, where there are several."""
    groups: dict[tuple[str, ...], dict[int, Setting]] = {}
    for setting in settings:
        first = cells[setting.places[0]]
        rest = [p for p in setting.parts[2:] if not p.startswith("nodes=")]
        group = groups.setdefault((first.source, setting.parts[0], *rest), {})
        if first.num_workers in group:  # on clusters of several sizes
            group = groups.setdefault((first.source, setting.parts[0], *setting.parts[2:]), {})
        group[first.num_workers] = setting
    tables = []
    for (_, *alike), by_workers in groups.items():
        counts = sorted(by_workers)[-(MOST_COLUMNS - 1) :]
        if len(counts) < 2:
            continue
        steps: dict[str, dict[int, float]] = {}
        places = [place for count in counts for place in by_workers[count].places]
        names = method_names(cells, places)
        alike_names = Counter((cells[place].num_workers, name) for place, name in names.items())
        for place, name in names.items():
            own = cells[place]
            if own.step_time_s and (is_compared(own) or is_upper_bound(own)):
                if alike_names[own.num_workers, name] > 1:  # told apart by what differs
                    name = by_workers[own.num_workers].names[place]
                steps.setdefault(name, {})[own.num_workers] = step_s(own)
        rows = sorted(steps.items(), key=lambda row: row[1].get(counts[-1], math.inf))
        tables.append(
            Table(
                title=f"Scaling of {', '.join(alike)}: step in ms by workers",
                headings=("method", *(f"{n} workers" for n in counts)),
                numeric=(False, *[True] * len(counts)),
                rows=tuple(
                    (name, *(ms_text(times.get(n)) for n in counts)) for name, times in rows
                ),
            )
        )
    return tables


def _break_evens(found: Sequence[CompressorBreakEven]) -> list[Table]:
    """From which rate down each compressor gained, and should have."""

    def rate(pays: Pays | None, bits_per_s: float | None) -> str:
        if bits_per_s is not None:
            return f"< {rate_text(bits_per_s)}"
        return PAYS_TEXTS.get(pays or "", "")

    forecast = any(each.foreseen is not None for each in found)

    def expected(each: CompressorBreakEven) -> tuple[Pays | None, float | None]:
        if forecast:
            return each.foreseen, each.foreseen_bits_per_s
        return each.predicted, each.predicted_bits_per_s

    def error(each: CompressorBreakEven) -> str:
        _, bits_per_s = expected(each)
        if each.measured_bits_per_s is None or bits_per_s is None:
            return ""
        return rounded(100 * (bits_per_s / each.measured_bits_per_s - 1))

    columns = [
        Column("workload", lambda each: short_text(each.workload), numeric=False),
        Column("backend", lambda each: each.backend, numeric=False),
        Column("workers", lambda each: str(each.num_workers)),
        Column("compressor", lambda each: each.compressor, numeric=False),
        Column("rates from", lambda each: rate_text(each.rates_bits_per_s[0])),
        Column("to", lambda each: rate_text(each.rates_bits_per_s[1])),
        Column("pays", lambda each: rate(each.measured, each.measured_bits_per_s)),
        Column("forecast" if forecast else "predicted", lambda each: rate(*expected(each))),
        Column("error %", error),
    ]
    return [table_of("Compressors, where they pay", columns, found)] if found else []


def _notes(report: Report) -> list[str]:
    """Failures by their reason, what is not compared, then what `make_report` warns of."""
    failed: dict[str, dict[str, None]] = {}
    other: dict[str, dict[str, None]] = {}
    for cell, name in zip(report.cells, full_names(report.cells), strict=True):
        if cell.status == "failed":
            failed.setdefault(f"failed: {last_line(cell.error) or NO_REASON}", {})[name] = None
        elif cell.failed_repeats:
            total = cell.repeats + cell.failed_repeats
            why = last_line(cell.error) or NO_REASON
            words = f"{cell.failed_repeats} of {total} repeats failed: {why}"
            failed.setdefault(words, {})[name] = None
        verdict, why = same_work(cell)
        if verdict == "no" and not is_upper_bound(cell):
            other.setdefault(f"not compared, other work: {why}", {})[name] = None
    none = [] if report.answers else ["no cell finished: no method is the fastest"]
    notes = none + [f"{'; '.join(names)}: {words}" for words, names in (failed | other).items()]
    ok = [cell for cell in report.cells if cell.status == "ok" and not is_upper_bound(cell)]
    unchecked = [cell for cell in ok if same_work(cell)[0] == "not checked"]
    if unchecked:
        notes.append(
            f"same work was not checked for {len(unchecked)} of {len(ok)} rows (--full says why)"
        )
    once = [cell for cell in ok if len(cell.run_medians_s) == 1]
    if once:
        notes.append(
            f"{len(once)} of {len(ok)} rows ran once, which proves nothing; use --repeats 5"
        )
    twice = [cell for cell in report.cells if len(cell.run_medians_s) == 2]
    if twice:
        notes.append(
            f"{len(twice)} of {len(report.cells)} rows ran twice: (a-b) are the faster and the "
            "slower run, no interval"
        )
    notes += _emulated(report.cells)
    notes += describe_errors(report.prediction_errors[:1])
    return [*notes, *report.cautions, MORE]


def _emulated(cells: Iterable[ReportCell]) -> list[str]:
    dilations = sorted({c.dilation for c in cells if c.cluster is not None and c.dilation != 1})
    if not dilations:
        return []
    times = " and ".join(f"{dilation:g}" for dilation in dilations)
    return [f"emulated: times are the cluster's; real ones are {times} times as long (dilation)"]


# As text.


def to_text(report: Report, width: int = WIDTH) -> str:
    """For a terminal: no line is longer than `width`."""
    short = shorten(report)
    blocks = ["\n".join(table_text(table, width)) for table in short.summary]
    for section in short.sections:
        blocks.append("\n".join([_heading_text(section.heading, width), *section.lines]))
        blocks += ["\n".join(table_text(table, width)) for table in section.tables]
    notes = [line for note in short.notes for line in _note_text(note, width)]
    return "\n\n".join([*blocks, "\n".join(notes)]) + "\n"


def _heading_text(heading: str, width: int) -> str:
    """The parts that have room in a line; the summary of the settings holds all of them."""
    return textwrap.shorten(heading, width, placeholder=" …")


def _note_text(note: str, width: int) -> list[str]:
    return textwrap.wrap(
        note,
        width,
        initial_indent="- ",
        subsequent_indent="  ",
        max_lines=_NOTE_LINES,
        placeholder=" …",
    )


# As documents.


def short_markdown(report: Report) -> str:
    """The same for GitHub."""
    short = shorten(report)
    lines = [text for table in short.summary for text in _table_markdown(table)]
    for section in short.sections:
        lines += [f"## {markdown_text(section.heading)}", ""]
        lines += [markdown_text(line) + "  " for line in section.lines] + [""]
        lines += [text for table in section.tables for text in _table_markdown(table)]
    lines += [f"- {markdown_text(note)}" for note in short.notes]
    return "\n".join(lines) + "\n"


def _table_markdown(table: Table) -> list[str]:
    return [
        f"**{markdown_text(table.title)}**",
        "",
        markdown_row(table.headings),
        markdown_row(["---:" if numeric else "---" for numeric in table.numeric]),
        *map(markdown_row, table.rows),
        "",
        *([markdown_text(table.below), ""] if table.below else []),
    ]


def short_latex(report: Report) -> str:
    """The same as paragraphs and `tabular`s of the package booktabs."""
    short = shorten(report)
    lines = [text for table in short.summary for text in _table_latex(table)]
    for section in short.sections:
        lines.append(rf"\paragraph{{{latex_text(section.heading)}}}")
        lines += [latex_text(line) for line in section.lines]
        lines += [text for table in section.tables for text in _table_latex(table)]
    return "\n".join([*lines, *(rf"\par {latex_text(note)}" for note in short.notes)]) + "\n"


def _table_latex(table: Table) -> list[str]:
    below = [rf"\par {latex_text(table.below)}"] if table.below else []
    return [
        rf"\par {latex_text(table.title)}\par",
        *latex_table(table.headings, table.numeric, table.rows),
        *below,
    ]


SHORT: Mapping[str, Callable[[Report], str]] = {
    "table": to_text,
    "md": short_markdown,
    "latex": short_latex,
}
