"""Published shapes: the simulated side against a second implementation, and what is claimed."""

import io
import json
import math
from pathlib import Path

import pytest

from testbed.base.errors import UnknownName, UsageError
from testbed.base.files import load_shipped_trace
from testbed.studies.published.asc_wfbp import TABLE, asc_wfbp_lines, contention_lines
from testbed.studies.published.gains import DEAR, OSF, ddl_benchmarks_lines, dear_lines, osf_lines
from testbed.studies.published.lines import (
    NEVER_SLOWER,
    SEARCHED,
    SIZES_MIB,
    Comparison,
    beside_o,
    candidates,
    count,
    distance,
    gain,
    iteration_s,
    searched_s,
    value,
)
from testbed.studies.published.links import EIGHT_NODES, K80, beating, beats_wire, link_of
from testbed.studies.published.mg_wfbp import PAPER as MG_WFBP
from testbed.studies.published.mg_wfbp import mg_wfbp_k80_lines, mg_wfbp_lines
from testbed.studies.published.study import PAPER_SHAPES, groups, to_markdown
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


def test_markdown_scores_and_numbers_reasons():
    lines = (
        gain("Paper A", "s1", "x over y", 1.2, 1.0, "a tie"),
        gain("Paper A", "s2", "x over y", 1.2, 1.3, ""),
        gain("Paper A", "s3", "x over z", 1.2, 3.0, "", left_out="one-sided"),
        gain("Paper A", "s4", "x over z", 1.5, 1.4, "", between=(0.0, 1.5)),
        value("Paper B", "s5", "seconds", 2.0, 1.0),
    )
    text = to_markdown(Comparison(lines=tuple(beside_o(lines, lines))))
    assert "Of 2 published gains that could come out in either direction 1 are on the" in text
    assert "1 are one-sided: " in text
    assert "1 of these were published as gains, of which 1 are gains here, too" in text
    assert "| gains of either direction | 2 | 1 | 0.13 | 100 % | 0.13 | 100 % |" in text
    assert "| one-sided gains: their size | 1 | 1 | 0.92 | 0 % |" in text
    assert "| bounds and ranges: what lies outside | 1 | 1 | 0.00 | 100 % |" in text
    assert "| s1 | x over y | 1.2 | 1 | 0.18 | 1 | 0.18 | does not hold (1) |  |" in text
    assert "| s4 | x over z | up to 1.5 | 1.4 | 0.00 |" in text
    assert "| seconds | 1 | 0.50 | 0.50 |" in text
    assert "\n(1) a tie\n" in text
    assert text.index("## Paper A") < text.index("## Paper B")


@pytest.mark.parametrize(
    ("simulated", "least", "most", "error"),
    [
        (1.5, 1.5, 1.5, 0.0),
        (3.0, 1.5, 1.5, math.log(2)),
        (0.75, 1.5, 1.5, math.log(2)),
        (1.0, 0.0, 1.5, 0.0),
        (3.0, 0.0, 1.5, math.log(2)),
        (1.5, 1.2, 2.0, 0.0),
        (0.6, 1.2, 2.0, math.log(2)),
        (4.0, 1.2, 2.0, math.log(2)),
    ],
)
def test_of_a_bound_only_what_lies_outside_is_an_error(simulated, least, most, error):
    assert distance(simulated, least, most) == pytest.approx(error)


def test_what_is_in_no_count_says_why():
    contention = contention_lines()
    assert {line.left_out for line in contention} == {"constant"}
    gains = [line for section in SECTIONS for line in section() if line.verdict]
    for line in gains:
        fast, _, slow = line.quantity.partition(" over ")
        if line.left_out == "one-sided":
            assert (fast, slow) in NEVER_SLOWER
        if not line.left_out:
            assert (fast, slow) not in NEVER_SLOWER
    exact = [line for line in gains if line.is_exact and not line.left_out]
    assert {line.quantity for line in exact} == {f"{f} over {s}" for f, s in CAN_LOSE}


CAN_LOSE = (("wfbp", "sequential"),)


def links_to_try():
    for latency_s in (1e-6, 1e-4, 1e-3, 1e-2):
        for seconds_per_byte in (1e-11, 1e-10, 1e-9, 1e-8):
            yield link_of((latency_s, seconds_per_byte), 16)


@pytest.mark.parametrize(("fast", "slow"), sorted(NEVER_SLOWER))
def test_a_one_sided_gain_is_no_loss_under_any_constants(fast, slow):
    for name in ("resnet50-v100", "densenet201-2080ti", "bert-base-2080ti"):
        trace = load_shipped_trace(name)
        for link in links_to_try():
            assert searched_s(fast, trace, link) <= iteration_s(slow, trace, link) * (1 + 1e-9)


@pytest.mark.parametrize(("fast", "slow"), CAN_LOSE)
def test_a_counted_gain_comes_out_in_either_direction(fast, slow):
    traces = map(load_shipped_trace, ("resnet50-v100", "densenet201-2080ti", "bert-base-2080ti"))
    ratios = [
        iteration_s(slow, trace, link) / searched_s(fast, trace, link)
        for trace in traces
        for link in links_to_try()
    ]
    assert min(ratios) < 1 - 1e-6
    assert max(ratios) > 1 + 1e-6


def test_the_links_that_beat_the_wire_are_known():
    assert beating() == {"10GbE, 16 GPUs", "10GbE, 32 GPUs", "10GbE, 64 GPUs"}
    assert not beats_wire("10GbE", 8, EIGHT_NODES[1])
    assert not any(beats_wire("10GbE", nodes, K80[nodes][1]) for nodes in K80)
    marked = {(x.paper, x.setting) for section in SECTIONS for x in section() if x.beats_wire}
    assert {paper for paper, _ in marked} == {MG_WFBP, OSF, DEAR}
    assert all("10GbE" in setting for _, setting in marked)


def test_rivals_have_as_many_candidates():
    counts = {method: len(candidates(method)) for method in SEARCHED}
    assert counts.keys() >= {"bucket", "cycle", "dear", "bytescheduler"}
    assert set(counts.values()) == {len(SIZES_MIB)}


def test_o_slows_a_message_for_each_tensor_and_its_own_rows_are_told():
    lines = {(x.setting, x.quantity): x for x in beside_o(mg_wfbp_lines(), mg_wfbp_lines(3e-4))}
    wfbp = lines["resnet152-2080ti FP32, 56Gb IB", "wfbp, seconds"]
    merged = lines["resnet152-2080ti FP32, 56Gb IB", "sequential, seconds"]
    tensors = len(load_shipped_trace("resnet152-2080ti").tensors)
    assert wfbp.with_o - wfbp.simulated == pytest.approx(tensors * 3e-4, rel=0.05)
    assert merged.with_o - merged.simulated == pytest.approx(3e-4)
    assert wfbp.knew_o
    assert not merged.knew_o
    assert not lines["resnet152-2080ti FP32, 10GbE", "wfbp, seconds"].knew_o
    found = groups(tuple(lines.values()))
    assert wfbp in found["from which o was chosen"]
    assert all(not x.knew_o for name, of in found.items() for x in of if "from which" not in name)


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
