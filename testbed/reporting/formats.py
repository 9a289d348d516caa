"""The report as text for documents and programs: Markdown, CSV, LaTeX, JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from testbed.records.report import Report, ReportCell, encode_report
from testbed.reporting.benchmark import to_benchmark
from testbed.reporting.columns import Column, columns_for
from testbed.reporting.ranking import describe_family
from testbed.reporting.work import is_upper_bound, undilated

_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "[": "{[}",  # else read as an option of the line break before it
    "]": "{]}",
}


def to_json(report: Report) -> str:
    """`testbed.report/1`, without the bulk of the cells."""
    return encode_report(report).decode()


def to_csv(report: Report) -> str:
    """One line per cell; units stand in the columns' names, figures have all their digits."""
    report = as_shown(report)
    columns = columns_for(report.cells)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([column.key for column in columns])
    for cell in report.cells:
        writer.writerow([_csv_value(column, cell) for column in columns])
    return text.getvalue()


def to_markdown(report: Report) -> str:
    """A table, then the notes and where the figures come from."""
    report = as_shown(report)
    columns = _visible(report)
    lines = [
        markdown_row([one_line(column.title) for column in columns]),
        markdown_row(["---:" if column.numeric else "---" for column in columns]),
        *(markdown_row([shown(column, cell) for column in columns]) for cell in report.cells),
    ]
    notes = [f"- {markdown_text(note)}" for note in below(report)]
    lines += ["", *notes] if notes else []
    lines += ["", markdown_text(report.provenance)] if report.provenance else []
    return "\n".join(lines) + "\n"


def to_latex(report: Report) -> str:
    """A `tabular` for the package booktabs, then the notes and where the figures come from."""
    report = as_shown(report)
    columns = _visible(report)
    table = latex_table(
        [one_line(column.title) for column in columns],
        [column.numeric for column in columns],
        [[shown(column, cell) for column in columns] for cell in report.cells],
    )
    ends = [*below(report), *([report.provenance] if report.provenance else [])]
    return "\n".join([*table, *(rf"\par {latex_text(line)}" for line in ends)]) + "\n"


def latex_table(
    headings: Sequence[str], numeric: Sequence[bool], rows: Iterable[Sequence[str]]
) -> list[str]:
    """The lines of a `tabular`."""
    align = "".join("r" if right else "l" for right in numeric)
    texts = [" & ".join(latex_text(text) for text in row) + r" \\" for row in (headings, *rows)]
    return [
        rf"\begin{{tabular}}{{{align}}}",
        r"\toprule",
        texts[0],
        r"\midrule",
        *texts[1:],
        r"\bottomrule",
        r"\end{tabular}",
    ]


FORMATS: Mapping[str, Callable[[Report], str]] = {
    "md": to_markdown,
    "csv": to_csv,
    "json": to_json,
    "latex": to_latex,
    "benchmark": lambda report: to_benchmark(as_shown(report)),
}


def as_shown(report: Report) -> Report:
    """The report with the times of the clusters that were emulated."""
    return msgspec.structs.replace(report, cells=[undilated(cell) for cell in report.cells])


def below(report: Report) -> list[str]:
    """What stands under a table of all cells: what each comparison resolves, then the notes."""
    return [*map(describe_family, report.families), *report.notes]


def shown(column: Column, cell: ReportCell) -> str:
    """A cell's text in a table for people; the step without communication is marked."""
    text = column.text(cell)
    if column.key == "backend" and is_upper_bound(cell):
        return f"{text} (upper bound)"
    return text


def _visible(report: Report) -> list[Column]:
    """The columns for people that hold anything."""
    columns = [column for column in columns_for(report.cells) if column.title]
    return [c for c in columns if any(c.text(cell) for cell in report.cells)]


def _csv_value(column: Column, cell: ReportCell) -> str:
    value = column.value(cell)
    if value is None:
        return ""
    return repr(value) if isinstance(value, float) else str(value)


def one_line(title: str) -> str:
    """A heading without the breaks that the terminal needs."""
    return title.replace("-\n", "").replace("/\n", "/").replace("\n", " ")


def markdown_row(texts: Sequence[str]) -> str:
    """A row of a table."""
    return "| " + " | ".join(markdown_text(text) for text in texts) + " |"


def markdown_text(text: str) -> str:
    """Text in which a bar ends no cell."""
    return text.replace("|", r"\|").replace("\n", " ")


def latex_text(text: str) -> str:
    """Text in which nothing is a command."""
    return "".join(_LATEX.get(character, character) for character in text.replace("\n", " "))
