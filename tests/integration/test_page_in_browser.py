"""The report's page in headless Chromium, without a network: sorted, filtered, copied, zoomed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from testbed.cli import make_app
from tests.harness import page_cells
from tests.harness.browser import drive, installed

ROOT = Path(__file__).parents[2]


def call(*arguments: object) -> str:
    done = CliRunner().invoke(make_app(), [str(a) for a in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module", params=["", "runs/tables/emulated", "runs/laysa/resnet50/batch-8"])
def seen(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], list[dict[str, Any]], Path]:
    """What the script saw, the cells of the JSON report, and the page."""
    installed()
    folder = tmp_path_factory.mktemp("browser")
    where = ROOT / request.param if request.param else page_cells.write(folder / "sweep")
    page = folder / "report.html"
    call("report", where, "--format", "html", "-o", page)
    return (
        drive("page.mjs", page),
        json.loads(call("report", where, "--format", "json"))["cells"],
        page,
    )


pytestmark = pytest.mark.timeout(400)
Seen = tuple[dict[str, Any], list[dict[str, Any]], Path]


def test_it_opens_alone_and_without_complaints(seen: Seen) -> None:
    found, cells, page = seen
    assert found["errors"] == []
    assert found["requests"] == [page.resolve().as_uri()]
    assert found["rows"] == list(range(len(cells)))
    assert found["pdf"] > 10_000


def test_headings_sort_both_ways_and_what_was_not_measured_stays_last(seen: Seen) -> None:
    found, cells, _ = seen

    def shown_s(place: int) -> float:
        value = cells[place]["step_time_s"]
        return float("inf") if value is None else value / cells[place]["dilation"]

    times = [shown_s(place) for place in found["ascending"]["rows"]]
    assert times == sorted(times)
    assert found["ascending"]["aria"] == "ascending"
    known = [t for t in map(shown_s, found["descending"]["rows"]) if t != float("inf")]
    assert known == sorted(known, reverse=True)
    assert len(found["descending"]["rows"]) == len(cells)
    assert [shown_s(p) for p in found["descending"]["rows"]][: len(known)] == known
    assert found["descending"]["aria"] == "descending"


def test_filters_hide_rows_and_bars_alike(seen: Seen) -> None:
    found, cells, _ = seen
    chosen = found["chosen"]
    if chosen["key"] == "":
        pytest.skip("nothing to choose from")
    fits = [
        number
        for number, cell in enumerate(cells)
        if chosen["value"] == str(cell["config"][chosen["key"]])
    ]
    assert sorted(chosen["rows"]) == fits
    assert 0 < len(fits) < len(cells)
    assert sorted(chosen["bars"]) == [n for n in fits if cells[n]["step_time_s"]]
    assert found["none"] == {"rows": [], "bars": [], "count": f"0 of {len(cells)} cells"}
    assert found["again"] == len(cells)


def test_all_columns_can_be_shown_and_commands_copied(seen: Seen) -> None:
    found, cells, _ = seen
    assert found["wide"] == [False, True]
    first = next(cell for cell in cells if cell["command"])
    assert found["copied"]["said"] == "Copied"
    assert found["copied"]["command"] == found["copied"]["selected"] == first["command"]


def test_timelines_are_drawn_and_zoom(seen: Seen) -> None:
    found, _, page = seen
    if not found["timelines"]:
        assert "Nothing is recorded" in page.read_text()
        return
    whole, near, again, dragged = found["drawings"]
    assert whole == again
    assert len({whole, near, dragged}) == 3
    assert found["told"].startswith("compute")


def test_a_timeline_follows_the_pointer_and_the_keys(seen: Seen) -> None:
    """What it complains about would be among the errors, see the first test."""
    found, _, _ = seen
    if not found["timelines"]:
        pytest.skip("nothing is recorded")
    assert found["undisturbed"] == [found["drawings"][-1]] * 3
    first, second, back = found["keys"]
    assert first["told"].startswith("compute forward: ")
    assert first["told"] == back["told"] != second["told"]
    assert first["drawn"] == back["drawn"] != second["drawn"]
    assert found["drawings"][0] not in (first["drawn"], second["drawn"])


def test_axe_finds_nothing_serious_in_the_light_nor_in_the_dark(seen: Seen) -> None:
    found, _, _ = seen
    papers = set()
    for scheme in ("light", "dark"):
        told = found["axe"][scheme]
        papers.add(told["paper"])
        assert told["passes"] > 20
        assert [v for v in told["violations"] if v["impact"] in ("serious", "critical")] == []
    assert len(papers) == 2


def test_nothing_is_wider_than_the_screen(seen: Seen) -> None:
    assert seen[0]["overflow"] == {"1280": 0, "400": 0}
