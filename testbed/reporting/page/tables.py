"""Tables of the page: headings that sort, rows that are filtered, figures with all their digits."""

from __future__ import annotations

from collections.abc import Sequence

from testbed.base.axes import AXES
from testbed.records.report import ReportCell
from testbed.reporting.columns import Column, columns_for, compression_columns, memory_columns
from testbed.reporting.formats import one_line, shown
from testbed.reporting.make import provenance
from testbed.reporting.page.groups import Placed
from testbed.reporting.page.markup import Markup, element, joined, scrolled, section

_MEANT = ("status", "num_workers")  # shown although they are the same in all rows


def tables(cells: Sequence[Placed]) -> list[Markup]:
    """The sections of tables: all cells; what compressing cost."""
    every = [each.cell for each in cells]
    found = [section("All cells", *_table("all cells", columns_for(every), cells))]
    compressed = [each for each in cells if each.cell.compression is not None]
    if compressed:
        columns = compression_columns([each.cell for each in compressed])
        told = element("p", "What compressing cost, for each step and rank.")
        found.append(
            section("Compression", told, *_table("compression", columns, compressed, named=True))
        )
    return found


def memory_table(cells: Sequence[Placed]) -> Markup | None:
    """What steps' memory was foreseen to be and was."""
    known = [each for each in cells if each.cell.memory is not None]
    if not known:
        return None
    return joined(
        *_table("memory", memory_columns([each.cell for each in known]), known, named=True)
    )


def _table(
    label: str, columns: Sequence[Column], cells: Sequence[Placed], *, named: bool = False
) -> list[Markup]:
    """What all rows have in common, then the table; `named`: with the cells' names."""
    titled = [c for c in columns if c.title and any(c.text(each.cell) for each in cells)]
    same = [
        c
        for c in titled
        if c.key not in _MEANT
        and len(cells) > 1
        and len({(c.text(each.cell), c.value(each.cell)) for each in cells}) == 1
    ]
    kept = [c for c in titled if c not in same]
    wide = any(c.wide for c in kept) and not all(c.wide for c in kept if c.numeric)
    parts = {axis.what for axis in AXES}
    kept = [c for c in kept if not (named and c.key in parts)]
    head = [element("th", element("button", "cell", type="button"), scope="col")] * named
    head += [_heading(c, wide) for c in kept]
    rows = [
        element(
            "tr",
            element("td", each.name) if named else None,
            *(_entry(c, each.cell, wide) for c in kept),
            data_cell=each.number,
        )
        for each in cells
    ]
    table = element(
        "table",
        element("thead", element("tr", *head)),
        element("tbody", *rows),
        class_="narrow" if wide else "",
    )
    common = "; ".join(f"{one_line(c.title)} {c.text(cells[0].cell)}" for c in same)
    box = element("input", type="checkbox", class_="all-columns")
    return [
        element("p", f"All of them: {common}.") if common else Markup(),
        element("label", box, " all columns") if wide else Markup(),
        scrolled(f"table of {label}", table),
    ]


def _heading(column: Column, wide: bool) -> Markup:
    button = element("button", one_line(column.title), type="button", title=column.key)
    return element("th", button, scope="col", data_key=column.key, class_=_class(column, wide))


def _entry(column: Column, cell: ReportCell, wide: bool) -> Markup:
    value = column.value(cell)
    return element(
        "td",
        shown(column, cell),
        data_value=None if value is None else repr(value) if column.numeric else None,
        class_=_class(column, wide),
    )


def _class(column: Column, wide: bool) -> str | None:
    return " ".join(["number"] * column.numeric + ["wide"] * (wide and column.wide)) or None


def commands(cells: Sequence[Placed]) -> Markup:
    """The command that repeats each cell, and what its first run says of where it ran."""
    rows = [
        element(
            "li",
            element("div", element("b", each.name), f" {each.cell.workload}, ", _runs(each.cell)),
            element(
                "div",
                scrolled(f"command of {each.name}", element("code", each.cell.command)),
                element("button", "Copy", type="button", class_="copy"),
                class_="command",
            )
            if each.cell.command
            else element("p", "The record holds no command."),
            _details(each.cell),
            data_cell=each.number,
        )
        for each in cells
    ]
    return section("Commands and provenance", element("ol", *rows, class_="commands"))


def _runs(cell: ReportCell) -> str:
    told = f"{cell.num_workers} workers, {cell.repeats} runs"
    return f"{told}, {cell.failed_repeats} failed" if cell.failed_repeats else told


def _details(cell: ReportCell) -> Markup:
    facts = {
        "plan": f"{cell.plan_reason} {cell.plan_digest[:16]}".strip(),
        "data": cell.data,
        "samples": cell.sample_digest[:16],
        "parameters": f"{cell.initial_digest[:16]} to {cell.final_digest[:16]}",
        "work": cell.identical_work_note,
        "folder": cell.source,
        "began": str(cell.environment.get("began", "")),
        "where": provenance([cell.environment]),
        "error": cell.error,
    }
    pairs = [
        joined(element("dt", name), element("dd", text))
        for name, text in facts.items()
        if text.strip(" to")
    ]
    return element("details", element("summary", "provenance"), element("dl", *pairs))
