"""The report as one HTML page: nothing is loaded, all is escaped, its numbers are the JSON's."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from testbed.cli import make_app
from testbed.prediction.cross_iteration import predict
from testbed.records.cell import encode_cell
from testbed.records.step_trace import computed_in, trace_of
from testbed.records.timeline import SUFFIX, encode_timeline
from testbed.reporting.page.curves import Line, chart, spread_out
from testbed.reporting.page.lanes import MAX_EVENTS_EACH, draw
from testbed.reporting.page.markup import VOID, data, element
from tests.harness import page_cells

ROOT = Path(__file__).parents[2]
LIMIT = 2_000_000
# What tables and bars show, and how much larger the figure is there than in a text for people.
TIMES = {
    "step_time_s": 1e-3,
    "compute_s": 1e-3,
    "exposed_comm_s": 1e-3,
    "predicted_step_time_s": 1e-3,
}
OTHERS = {
    "num_workers": 1,
    "efficiency": 1e-2,
    "peak_memory_bytes": 1e6,
    "wire_bytes_per_step": 1e6,
}


@dataclass
class Node:
    """An element of the page."""

    tag: str
    attrs: dict[str, str]
    parent: Node | None = None
    children: list[Node] = field(default_factory=list)
    text: str = ""

    def all(self, tag: str = "", **attrs: str) -> list[Node]:
        found = []
        for child in self.children:
            fits = all(child.attrs.get(k.replace("_", "-")) == v for k, v in attrs.items())
            found += [child] * (fits and tag in ("", child.tag)) + child.all(tag, **attrs)
        return found

    @property
    def whole(self) -> str:
        return self.text + "".join(child.whole for child in self.children)


class Tree(HTMLParser):
    """Elements as they nest; an end that closes nothing that is open fails."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.root = self.at = Node("", {})
        self.feed(text)
        assert self.at is self.root, f"<{self.at.tag}> is not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, {name: value or "" for name, value in attrs}, self.at)
        self.at.children.append(node)
        if tag not in VOID:
            self.at = node

    def handle_endtag(self, tag: str) -> None:
        assert self.at.tag == tag
        assert self.at.parent is not None
        self.at = self.at.parent

    def handle_data(self, data: str) -> None:
        self.at.text += data


def report(*arguments: object) -> str:
    done = CliRunner().invoke(make_app(), ["report", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def page_of(folder: Path, out: Path) -> tuple[str, Node]:
    report(folder, "--format", "html", "-o", out)
    text = out.read_text()
    return text, Tree(text).root


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return page_cells.write(tmp_path_factory.mktemp("page") / "sweep")


@pytest.fixture(scope="module")
def made(folder: Path) -> tuple[str, Node]:
    return page_of(folder, folder.parent / "report.html")


def test_an_element_escapes_its_text_and_its_attributes() -> None:
    made = element("p", "<b>", element("i", "&"), title='"<', class_=None, hidden=True)
    assert made == '<p title="&quot;&lt;" hidden>&lt;b&gt;<i>&amp;</i></p>'


def test_data_cannot_end_its_element() -> None:
    (script,) = Tree(data([page_cells.HOSTILE, 1.5])).root.children
    assert json.loads(script.text) == [page_cells.HOSTILE, 1.5]


def test_every_text_of_a_record_is_escaped(made: tuple[str, Node]) -> None:
    text, root = made
    assert "<x-evil" not in text
    assert root.all("x-evil") == []
    shown = root.whole
    assert shown.count(page_cells.HOSTILE) >= 6  # heading, command, plan, data, work, commit, error
    for script in root.all("script", type="application/json"):
        json.loads(script.text)


def test_nothing_is_loaded(made: tuple[str, Node]) -> None:
    text, root = made
    (policy,) = root.all("meta", http_equiv="Content-Security-Policy")
    assert policy.attrs["content"].startswith("default-src 'none'")
    nodes = root.all()
    assert len(nodes) > 300
    for node in nodes:
        assert not {"src", "srcset", "action", "background", "data", "poster"} & node.attrs.keys()
        assert node.tag not in ("link", "iframe", "object", "embed", "img", "base", "image", "use")
        assert node.attrs.get("href", "#").startswith("#")
    for own in (*root.all("style"), *(s for s in root.all("script") if not s.attrs)):
        assert not re.search(r"url\(|@import|https?:|fetch\(|XMLHttp|import\(", own.text)
    assert re.findall(r"https?://", text) == []


def test_links_lead_to_the_sections(made: tuple[str, Node]) -> None:
    _, root = made
    sections = [node.attrs["id"] for node in root.all("section")]
    assert [a.attrs["href"] for a in root.all("a")] == [f"#{name}" for name in sections]
    assert sections == [
        *("answer", "step-time", "all-cells", "compression", "scaling"),
        *("time-to-accuracy-or-loss", "memory", "timeline", "notes", "commands-and-provenance"),
    ]


FOLDERS = (
    "runs/tables/emulated",
    "runs/tables/ddp-pairs-dilated",
    "runs/laysa/resnet50/batch-8",
    "runs/compressors/table",
)


@pytest.mark.parametrize("name", [*FOLDERS, ""])
def test_numbers_are_those_of_the_json(name: str, folder: Path, tmp_path: Path) -> None:
    """The JSON has real times, the page those of the emulated cluster; texts round both."""
    where = ROOT / name if name else folder
    text, root = page_of(where, tmp_path / "report.html")
    assert len(text.encode()) < LIMIT
    check_numbers(root, json.loads(report(where, "--format", "json")))


def test_the_committed_pages_are_whole() -> None:
    """That of `emulated` has the numbers of its folder; that of `quick` shows real timelines."""
    pages = {name: ROOT / "docs" / f"report-{name}.html" for name in ("emulated", "quick")}
    assert all(path.stat().st_size < LIMIT for path in pages.values())
    told = json.loads(report(ROOT / "runs/tables/emulated", "--format", "json"))
    check_numbers(Tree(pages["emulated"].read_text()).root, told)
    quick = Tree(pages["quick"].read_text()).root
    for canvas in quick.all("canvas"):
        assert "rank 1, communication 0" in canvas.attrs["aria-label"]
    assert len(quick.all("canvas")) == 5


def test_the_committed_page_is_what_the_program_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    made = tmp_path / "report.html"
    forecast = ("--forecast", "runs/forecasts/emulated.json")
    report("runs/tables/emulated", *forecast, "--format", "html", "-o", made)
    assert made.read_text() == (ROOT / "docs/report-emulated.html").read_text()


def check_numbers(root: Node, told: dict[str, Any]) -> None:
    """Figures in tables and bars against the JSON report."""
    compared = 0

    def same(value: str | None, exact: float | None, text: str, unit: float) -> None:
        nonlocal compared
        assert (value is None) == (exact is None), (value, exact, text)
        if value is not None and exact is not None:
            compared += 1
            assert float(value) == pytest.approx(exact, rel=1e-12)
            (first, *_) = re.findall(r"-?\d+\.?\d*", text)
            assert float(first) == pytest.approx(exact / unit, rel=6e-3, abs=1e-9)

    (main,) = root.all("section", id="all-cells")
    keys = [head.attrs["data-key"] for head in main.all("th")]
    rows = [row for row in main.all("tr") if "data-cell" in row.attrs]
    assert len(rows) == len(told["cells"])
    for row in rows:
        cell = told["cells"][int(row.attrs["data-cell"])]
        for key, entry in zip(keys, row.children, strict=True):
            factor = cell["dilation"] if key in TIMES else 1
            if key in TIMES or key in OTHERS:
                exact = cell[key] if cell[key] is None else cell[key] / factor
                unit = {**TIMES, **OTHERS}[key]
                same(entry.attrs.get("data-value"), exact, entry.whole, unit)
    bars = root.all("section", id="step-time")[0].all("li")
    assert len(bars) == sum(bool(cell["step_time_s"]) for cell in told["cells"])
    for bar in bars:
        cell = told["cells"][int(bar.attrs["data-cell"])]
        for part in bar.all("span"):
            if key := part.attrs.get("data-key"):
                exact = {**cell, **(cell["compression"] or {})}[key] / cell["dilation"]
                same(part.attrs["data-value"], exact, part.whole, 1e-3)
    for part in (p for s in root.all("section", id="memory") for p in s.all("span")):
        if key := part.attrs.get("data-key"):
            assert part.parent is not None
            assert part.parent.parent is not None
            found = told["cells"][int(part.parent.parent.attrs["data-cell"])]
            for step in key.split("."):
                found = found[step]
            same(part.attrs["data-value"], found, part.whole, 1e6)
    assert compared > 5 * len(rows)


def test_bars_are_as_long_as_their_figures(made: tuple[str, Node]) -> None:
    _, root = made
    (chart, *_) = root.all("section", id="step-time")[0].all("figure")
    scale = []
    for bar in chart.all("li"):
        figures = {p.attrs.get("data-key"): p.attrs.get("data-value") for p in bar.all("span")}
        for rect in bar.all("rect"):
            wide, value = float(rect.attrs["width"].rstrip("%")), figures[rect.attrs["class"]]
            assert value is not None
            scale.append(wide / float(value))
        compute, exposed = bar.all("rect")[:2]
        assert exposed.attrs["x"] == compute.attrs["width"]
    assert len(scale) > 8
    assert scale == pytest.approx([scale[0]] * len(scale), rel=1e-3)


def test_lines_over_workers_hold_what_was_measured_and_predicted(
    folder: Path, made: tuple[str, Node]
) -> None:
    told = json.loads(report(folder, "--format", "json"))["cells"]
    dots = made[1].all("section", id="scaling")[0].all("circle")
    kinds = [dot.attrs["data-key"] for dot in dots]
    assert kinds.count("samples_per_s") == kinds.count("predicted_step_time_s") == 4
    for dot in dots:
        cell = told[int(dot.attrs["data-cell"])]
        assert float(dot.attrs["data-x"]) == cell["num_workers"]
        measured = dot.attrs["data-key"] == "samples_per_s"
        step_s = cell["step_time_s"] if measured else cell["predicted_step_time_s"]
        samples = cell["num_workers"] * cell["batch_size"]
        assert float(dot.attrs["data-value"]) == pytest.approx(samples / step_s)


def test_one_number_of_workers_is_no_curve(tmp_path: Path) -> None:
    cells = tmp_path / "sweep" / "cells"
    cells.mkdir(parents=True)
    for number, backend in enumerate(("gloo", "mpi-ring")):
        found = msgspec.structs.replace(page_cells.cell(backend, 2), accuracy_curve=[])
        (cells / f"{number}.json").write_bytes(encode_cell(found))
    _, root = page_of(tmp_path / "sweep", tmp_path / "report.html")
    sections = [node.attrs["id"] for node in root.all("section")]
    assert not {"scaling", "time-to-accuracy-or-loss", "memory", "compression"} & set(sections)
    (empty,) = root.all("section", id="timeline")
    assert "--timeline" in empty.whole
    assert root.all("canvas") == []


@pytest.mark.parametrize("level", [0.0, 0.5, 1.0])
def test_a_line_that_stays_on_its_level_is_drawn(level: float) -> None:
    line = Line("a", ((1.0, level), (2.0, level)), (0, 0), "k")
    drawn = str(chart("flat", "s", "y", [line], from_zero=False))
    assert "nan" not in drawn
    assert "<svg" in drawn


def test_labels_of_lines_do_not_cover_each_other() -> None:
    places = [10.0, 12.0, 11.0, 270.0, 271.0, 272.0]
    moved = spread_out(places)
    assert sorted(range(6), key=lambda i: (places[i], i)) == sorted(
        range(6), key=lambda i: moved[i]
    )
    ends = sorted(moved)
    assert min(b - a for a, b in itertools.pairwise(ends)) >= 14 - 1e-9


def test_events_as_predicted_lie_under_the_prediction() -> None:
    """Two ranks that did what the simulator says, ten times slower."""
    drawn = draw(page_cells.timeline(dilation=10.0), 1000)
    assert (drawn.steps, drawn.left_out, drawn.told) == ((0, 1, 2), 0, "")
    predicted = [b for b in drawn.bars if b[0] == "predicted, channel 0"]
    measured = [b for b in drawn.bars if b[0] == "rank 1, communication 0"]
    assert len(predicted) == len(measured) == 12
    assert [b[2:4] for b in predicted] == [pytest.approx(b[2:4]) for b in measured]
    undilated = draw(page_cells.timeline(), 1000)
    assert [b[2:4] for b in undilated.bars] == [pytest.approx(b[2:4]) for b in drawn.bars]


def test_nothing_is_predicted_of_compressed_gradients() -> None:
    drawn = draw(msgspec.structs.replace(page_cells.timeline(), compressor="topk"), 1000)
    assert "topk" in drawn.told
    assert not any(bar[0].startswith("predicted") for bar in drawn.bars)


def test_a_trace_made_from_events_is_the_one_that_they_came_from() -> None:
    timeline, plan = page_cells.timeline(), page_cells.plan()
    (computed,) = computed_in(timeline, [1], (0, 1))
    trace = trace_of(plan, [computed])
    assert trace.ready_s() == pytest.approx(page_cells.TRACE.ready_s())
    assert trace.forward_s == pytest.approx(page_cells.TRACE.forward_s)
    found = predict(plan, page_cells.TRACE, page_cells.LINK)
    assert computed.turn_s == pytest.approx(found.iteration_s + trace.forward_s)


def test_what_is_predicted_waits_for_the_last_rank_as_advice_does() -> None:
    timeline, plan = page_cells.timeline(), page_cells.plan()
    late = [
        msgspec.structs.replace(e, begin_s=e.begin_s + 1e-3, end_s=e.end_s + 1e-3)
        if e.rank == 1 and e.kind == "ready"
        else e
        for e in timeline.events
    ]
    timeline = msgspec.structs.replace(timeline, events=tuple(late))
    trace = trace_of(plan, computed_in(timeline, range(3), range(2)))
    spans = predict(plan, trace, page_cells.LINK).spans
    turn_s = page_cells.TRACE.forward_s
    drawn = [bar for bar in draw(timeline, 1000).bars if bar[0] == "predicted, channel 0"]
    assert [bar[2] for bar in drawn[:4]] == pytest.approx([turn_s + s.start_s for s in spans])
    first_s = min(page_cells.TRACE.ready_s())
    assert drawn[0][2] == pytest.approx(turn_s + first_s + 1e-3)


def test_a_timeline_is_in_reach_of_the_keyboard_and_told(made: tuple[str, Node]) -> None:
    canvases = made[1].all("canvas")
    assert canvases
    for each in canvases:
        assert (each.attrs["tabindex"], each.attrs["role"]) == ("0", "application")
    for figure in made[1].all("figure"):
        if figure.all("canvas"):
            assert [each.attrs["aria-live"] for each in figure.all("output")] == ["polite"]


def test_too_many_events_are_thinned_out_and_the_page_says_so(tmp_path: Path) -> None:
    many = page_cells.timeline(num_steps=2, copies=1000)
    assert len(many.events) > 4 * MAX_EVENTS_EACH
    drawn = draw(many, MAX_EVENTS_EACH)
    own = [e for e in many.events if e.step == 1]
    assert drawn.steps == (1,)
    assert drawn.left_out == len(own) - MAX_EVENTS_EACH > 0
    cells = tmp_path / "sweep" / "cells"
    cells.mkdir(parents=True)
    data = encode_timeline(many)
    for number in range(12):
        made = page_cells.cell("gloo", 2, config={"seed": number})
        (cells / f"{number:02}.json").write_bytes(encode_cell(made))
        (cells / f"{number:02}{SUFFIX}").write_bytes(data)
    text, root = page_of(tmp_path / "sweep", tmp_path / "report.html")
    assert len(text.encode()) < LIMIT
    told = [p.whole for p in root.all("p") if p.attrs.get("class") == "told"]
    assert len(told) == 12
    assert all("of the shortest events are not drawn" in line for line in told)


def test_a_timeline_whose_steps_found_no_room_is_left_out(tmp_path: Path) -> None:
    cells = tmp_path / "sweep" / "cells"
    cells.mkdir(parents=True)
    (cells / "0.json").write_bytes(encode_cell(page_cells.cell("gloo", 2)))
    none = msgspec.structs.replace(page_cells.timeline(), events=(), dropped=9)
    (cells / f"0{SUFFIX}").write_bytes(encode_timeline(none))
    _, root = page_of(tmp_path / "sweep", tmp_path / "report.html")
    (empty,) = root.all("section", id="timeline")
    assert "Nothing is recorded" in empty.whole


def test_a_timeline_without_a_plan_is_drawn_and_says_why_nothing_is_predicted() -> None:
    found = msgspec.structs.replace(page_cells.timeline(), plan=None)
    drawn = draw(found, 1000)
    assert "holds no plan" in drawn.told
    assert {bar[0] for bar in drawn.bars} == {
        f"rank {r}, {lane}" for r in (0, 1) for lane in ("compute", "communication 0")
    }


def test_a_damaged_cell_is_named_and_its_timeline_left_out(tmp_path: Path) -> None:
    folder = page_cells.write(tmp_path / "sweep")
    (folder / "cells" / "000.json").write_text('{"schema": "testb')
    text, _ = page_of(folder, tmp_path / "report.html")
    assert "000.json" in text


@pytest.mark.parametrize("name", ["cells/000.timeline.json", "a.memory.json"])
def test_a_file_that_is_something_else_is_named(tmp_path: Path, name: str) -> None:
    folder = page_cells.write(tmp_path / "sweep")
    (folder / name).write_text("{}")
    done = CliRunner().invoke(make_app(), ["report", str(folder), "--format", "html"])
    assert name.rpartition("/")[2] in str(done.exception)
