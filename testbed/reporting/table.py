"""A table for people: at most eight columns, what is alike in its title, as text that fits."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from testbed.reporting.answer_text import WIDTH, clipped

MOST_COLUMNS: Final = 8
_GAP = 2
_LEAST_WIDTH = 8


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
class Column:
    """One column of a table for people.

    Attributes:
        heading: with the unit.
        text: of a row, whatever stands for it.
        numeric: whether it holds figures.
    """

    heading: str
    text: Callable[[Any], str]
    numeric: bool = True


def table_of(title: str, columns: Sequence[Column], rows: Sequence[Any], below: str = "") -> Table:
    """Columns that hold something; what is alike in all rows moves to the title."""
    constant, kept = [], []
    for column in columns:
        texts = [column.text(row).strip() for row in rows]
        told = set(texts) if column.numeric else set(filter(None, texts))
        if len(told) > 1 or (len(rows) == 1 and any(texts)):
            kept.append(column)
        elif any(texts):
            constant.append(f"{column.heading} {max(texts)}")
    kept = kept[:MOST_COLUMNS]
    while constant and len(", ".join([title, constant[0]])) <= WIDTH:
        title = ", ".join([title, constant.pop(0)])
    below = "; ".join(filter(None, [", ".join(constant), below]))
    return Table(
        title=title,
        headings=tuple(column.heading for column in kept),
        numeric=tuple(column.numeric for column in kept),
        rows=tuple(tuple(column.text(row) for column in kept) for row in rows),
        below=below,
    )


def table_text(table: Table, width: int) -> list[str]:
    """Title, headings, a rule, rows; words that have no room are broken into several lines."""
    every = [table.headings, *table.rows]
    widths = [max(len(row[c]) for row in every) for c in range(len(table.headings))]
    words = [c for c, numeric in enumerate(table.numeric) if not numeric]
    room = width - _GAP * (len(widths) - 1)
    while sum(widths) > room:
        widest = max(words, key=lambda c: widths[c])
        least = len(table.headings[widest])
        if widths[widest] <= max(_LEAST_WIDTH, least):
            break
        widths[widest] -= 1
    lines = [clipped(table.title, width), _row(table.headings, widths, table.numeric)]
    lines.append("─" * min(width, sum(widths) + _GAP * (len(widths) - 1)))
    for row in table.rows:
        broken = [_broken(text, widths[c]) if c in words else [text] for c, text in enumerate(row)]
        for n in range(max(map(len, broken))):
            texts = [lines_[n] if n < len(lines_) else "" for lines_ in broken]
            lines.append(_row(texts, widths, table.numeric))
    return lines + textwrap.wrap(table.below, width)


def _row(texts: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    cells = [
        text.rjust(width) if right else text.ljust(width)
        for text, width, right in zip(texts, widths, numeric, strict=True)
    ]
    return (" " * _GAP).join(cells).rstrip()


def _broken(text: str, width: int) -> list[str]:
    """Lines of a width, broken behind commas, colons, pluses and blanks where that is possible."""
    lines = [""]
    for piece in re.findall(r"[^,:+ ]*[,:+ ]?", text):
        while len(piece.rstrip()) > width:
            lines.append(piece[:width])
            piece = piece[width:]
        if len((lines[-1] + piece).rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return [line.rstrip() for line in lines if line] or [""]
