"""Published shapes: the simulated side against a second implementation, and what is claimed."""

import io
import json
from pathlib import Path

import pytest

from testbed.base.errors import UnknownName, UsageError
from testbed.base.files import load_shipped_trace
from testbed.studies.published.asc_wfbp import TABLE, asc_wfbp_lines, contention_lines
from testbed.studies.published.gains import dear_lines, osf_lines
from testbed.studies.published.lines import EIGHT_NODES, Comparison, count, gain, value
from testbed.studies.published.mg_wfbp import mg_wfbp_k80_lines, mg_wfbp_lines
from testbed.studies.published.study import PAPER_SHAPES, ddl_benchmarks_lines, to_markdown
from testbed.sweeping.recipe import load_recipe
from testbed.sweeping.study import Study, carry_out_study, find_study
from tests.harness import formulas

PUBLISHED = Path(__file__).parent.parent.parent / "runs" / "published"
SECTIONS = (
    asc_wfbp_lines,
    mg_wfbp_lines,
    mg_wfbp_k80_lines,
    osf_lines,
    dear_lines,
    ddl_benchmarks_lines,
    contention_lines,
)


@pytest.mark.parametrize(
    ("published", "simulated", "at_least", "verdict"),
    [
        (1.2, 1.1, 1.0, "holds"),
        (1.2, 1.0, 1.0, "does not hold"),
        (0.99, 1.0, 1.0, "holds"),
        (0.95, 1.3, 1.0, "does not hold"),
        (1.322, 1.4, 1.322, "holds"),
        (1.322, 1.3, 1.322, "does not hold"),
    ],
)
def test_an_inequality_holds_on_the_published_side(published, simulated, at_least, verdict):
    line = gain("p", "s", "q", published, simulated, "because", at_least)
    assert line.verdict == verdict
    assert line.reason == ("because" if verdict != "holds" else "")
    assert line.ratio == simulated / published


@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: s.__name__)
def test_what_does_not_hold_has_a_reason(section):
    lines = section()
    assert len({(line.setting, line.quantity, line.published) for line in lines}) == len(lines)
    for line in lines:
        assert (line.verdict == "does not hold") == bool(line.reason), line
        assert line.published > 0
        assert line.simulated > 0


@pytest.mark.parametrize("name", TABLE)
def test_asc_times_are_those_of_the_formulas(name):
    trace = load_shipped_trace(name)
    t_b = [0.0, *(t.backward_s for t in trace.tensors)]
    layers = formulas.Layers(t_b, [0.0, *(float(t.num_bytes) for t in trace.tensors)], *EIGHT_NODES)
    asc = formulas.asc_wfbp(layers)
    ends = {
        "wfbp": formulas.serial(layers, formulas.wfbp(layers))[-1][1],
        "mg-wfbp": formulas.serial(layers, formulas.mg_wfbp(layers))[-1][1],
        "asc-wfbp": max(e for _, e in formulas.concurrent(layers, asc, 2, lambda k: (k + 1) / 2)),
    }
    lines = {(line.setting, line.quantity): line for line in asc_wfbp_lines()}
    for spec, end_s in ends.items():
        found = lines[f"{name}, 10GbE", f"{spec}, seconds"]
        assert found.simulated == pytest.approx(trace.forward_s + end_s, abs=1e-9)


def test_asc_is_the_fastest_of_the_three_within_each_model():
    gains = [line for line in asc_wfbp_lines() if line.quantity.startswith("asc-wfbp over")]
    assert len(gains) == 3 * len(TABLE)
    assert all(line.verdict == "holds" for line in gains)


def test_the_bound_on_the_speedup_is_the_published_one():
    bounds = [line for line in asc_wfbp_lines() if line.quantity == "bound on the speed-up"]
    assert len(bounds) == len(TABLE)
    assert all(line.ratio == pytest.approx(1, abs=0.005) for line in bounds)


def test_mg_wfbp_wins_where_the_table_says_so_on_ethernet():
    lines = [
        line
        for line in mg_wfbp_lines()
        if "10GbE" in line.setting and line.quantity.startswith("mg-wfbp over")
    ]
    assert count(lines) == (16, 16)


def test_markdown_counts_and_numbers_reasons():
    lines = (
        gain("Paper A", "s1", "x over y", 1.2, 1.0, "a tie"),
        gain("Paper A", "s2", "x over y", 1.2, 1.3, ""),
        value("Paper B", "s3", "seconds", 2.0, 1.0),
    )
    text = to_markdown(Comparison(lines=lines))
    assert "1 of 2 published inequalities hold" in text
    assert "| s1 | x over y | 1.2 | 1 | 0.833 | does not hold (1) |" in text
    assert "\n(1) a tie\n" in text
    assert text.index("## Paper A") < text.index("## Paper B")


def test_a_study_prints_and_writes_its_files(tmp_path):
    study = Study("mine", "two files", lambda: {"mine.md": "# text\n", "mine.json": "{}\n"})
    out = io.StringIO()
    assert carry_out_study(study, tmp_path / "new", tmp_path / "a.json", {"steps": None}, out) == 0
    assert out.getvalue() == "# text\n"
    assert {p.name for p in (tmp_path / "new").iterdir()} == {"mine.md", "mine.json"}
    assert (tmp_path / "a.json").read_text() == "{}\n"
    with pytest.raises(UsageError, match="no cells for backend"):
        carry_out_study(study, None, None, {"backend": ("gloo",)}, out)


def test_studies_are_found_beside_recipes():
    assert find_study("paper-shapes") is PAPER_SHAPES
    assert find_study("quick") is None
    assert find_study(None) is None
    with pytest.raises(UnknownName, match="did you mean 'paper-shapes'"):
        load_recipe("papershapes")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_table_in_the_repository_is_what_the_study_makes():
    files = PAPER_SHAPES.compute()
    assert files["paper-shapes.md"] == (PUBLISHED / "paper-shapes.md").read_text()
    assert json.loads(files["paper-shapes.json"]) == json.loads(
        (PUBLISHED / "paper-shapes.json").read_text()
    )
