"""The page: sections in the order in which they answer questions, with style and script in it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

from testbed.base.axes import AXES
from testbed.records.memory import MemorySimulation
from testbed.records.report import Report
from testbed.reporting.columns import columns_for
from testbed.reporting.formats import as_shown, below, shown
from testbed.reporting.page.bars import step_bars
from testbed.reporting.page.curves import scaling, time_to_target
from testbed.reporting.page.groups import Placed, placed
from testbed.reporting.page.lanes import Recorded, timelines
from testbed.reporting.page.markup import Markup, element, joined, section
from testbed.reporting.page.memory import memory_section
from testbed.reporting.page.tables import commands, tables

# nothing is loaded from anywhere, whatever the cells' texts say
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def to_html(
    report: Report,
    title: str,
    recorded: Sequence[Recorded] = (),
    foreseen: Sequence[MemorySimulation] = (),
) -> str:
    """One file with everything in it: it opens from a disk, without a network.

    Args:
        report: with samples and curves of accuracy.
        title: of the page: the folders' names.
        recorded: timelines of its cells.
        foreseen: simulations of memory, with curves.
    """
    report = as_shown(report)
    cells = placed(report.cells)
    sections = [
        _answer(report),
        step_bars(cells),
        *tables(cells),
        scaling(cells),
        time_to_target(cells),
        memory_section(cells, foreseen),
        timelines(cells, recorded),
        _notes(below(report)),
        commands(cells),
    ]
    found = [each for each in sections if each is not None]
    return "<!doctype html>\n" + element(
        "html",
        element(
            "head",
            element("meta", charset="utf-8"),
            element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
            element("meta", name="viewport", content="width=device-width, initial-scale=1"),
            element("meta", name="color-scheme", content="light dark"),
            element("title", f"Testbed: {title}"),
            element("style", _own("page.css")),
        ),
        element(
            "body",
            element(
                "header",
                element("h1", title),
                element("p", report.provenance, class_="provenance") if report.provenance else None,
            ),
            _bar(cells, found),
            element("main", *found),
            element("script", _own("page.js")),
        ),
        lang="en",
    )


def _answer(report: Report) -> Markup | None:
    """What the cells say, in words."""
    if not report.answers:
        return None
    told = [
        joined(
            element("h3", answer.setting),
            element("p", " ".join(answer.lines), class_="answer"),
        )
        for answer in report.answers
    ]
    return section("Answer", *told)


def _own(name: str) -> Markup:
    return Markup((files(__package__) / name).read_text("utf-8"))


def _bar(cells: Sequence[Placed], sections: Sequence[Markup]) -> Markup:
    """Where to go, and which cells to show."""
    links = []
    for each in sections:
        name = each.partition('id="')[2].partition('"')[0]
        links.append(element("a", name.replace("-", " "), href=f"#{name}"))
    every = [each.cell for each in cells]
    keys = {axis.what for axis in AXES} | {"num_workers", "status"}
    choices = []
    for column in columns_for(every):
        values = dict.fromkeys(shown(column, cell) for cell in every)
        if column.key in keys and column.title and len(values) > 1:
            options = [element("option", text, value=text) for text in values]
            first = element("option", f"any {column.key.replace('_', ' ')}", value="")
            choices.append(
                element("select", first, *options, data_key=column.key, aria_label=column.key)
            )
    box = element(
        "input", type="search", placeholder="Filter cells", aria_label="Filter cells", id="filter"
    )
    count = element("output", f"{len(cells)} cells", id="count")
    return element(
        "nav",
        element("div", *links, class_="links"),
        element("div", box, *choices, count, class_="filters"),
        aria_label="Sections and filter",
    )


def _notes(lines: Sequence[str]) -> Markup | None:
    if not lines:
        return None
    return section("Notes", element("ul", *(element("li", line) for line in lines), class_="notes"))
