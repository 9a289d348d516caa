"""The report as text for documents and programs: Markdown, CSV, LaTeX, JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping

import msgspec

from testbed.records.report import Report, ReportCell, encode_report
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
        _markdown_row([one_line(column.title) for column in columns]),
        _markdown_row(["---:" if column.numeric else "---" for column in columns]),
        *(_markdown_row([shown(column, cell) for column in columns]) for cell in report.cells),
    ]
    notes = [f"- {_markdown_text(note)}" for note in below(report)]
    lines += ["", *notes] if notes else []
    lines += ["", _markdown_text(report.provenance)] if report.provenance else []
    return "\n".join(lines) + "\n"


def to_latex(report: Report) -> str:
    """A `tabular` for the package booktabs, then the notes and where the figures come from."""
    report = as_shown(report)
    columns = _visible(report)
    align = "".join("r" if column.numeric else "l" for column in columns)
    titles = " & ".join(_latex_text(one_line(c.title)) for c in columns)
    rows = [
        " & ".join(_latex_text(shown(column, cell)) for column in columns) + r" \\"
        for cell in report.cells
    ]
    table = [
        rf"\begin{{tabular}}{{{align}}}",
        r"\toprule",
        titles + r" \\",
        r"\midrule",
        *rows,
        r"\bottomrule",
        r"\end{tabular}",
    ]
    ends = [*below(report), *([report.provenance] if report.provenance else [])]
    return "\n".join([*table, *(rf"\par {_latex_text(line)}" for line in ends)]) + "\n"


FORMATS: Mapping[str, Callable[[Report], str]] = {
    "md": to_markdown,
    "csv": to_csv,
    "json": to_json,
    "latex": to_latex,
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


def _markdown_row(texts: list[str]) -> str:
    return "| " + " | ".join(_markdown_text(text) for text in texts) + " |"


def _markdown_text(text: str) -> str:
    return text.replace("|", r"\|").replace("\n", " ")


def _latex_text(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text.replace("\n", " "))
