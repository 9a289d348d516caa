"""`testbed simulate` as a user calls it: files in, table or JSON out."""

import json as json_module

import msgspec
import pytest
import typer
from hypothesis import HealthCheck, given, settings

from testbed.commands.simulate import ALL, scheduler_specs, simulate
from testbed.errors import UnknownName, UsageError
from testbed.prediction.crossing import predict
from testbed.prediction.files import save_link, save_trace
from testbed.records.simulation import decode_simulation
from testbed.scheduling.auto import ACROSS_ITERATIONS, WITHIN_BACKWARD, AutoOptions, noise_of
from testbed.scheduling.plan_file import load_plan
from testbed.scheduling.protocol import make_plan
from tests.unit.crossing_cases import LINK_A, TRACE_A, link_of, links, trace_of, traces

CROSSING = {"pace", "bytescheduler", "p3", "dear"}
RESULT_KEYS = ["scheduler", "num_messages", "messages", "iteration_s", "exposed_s", "lower_bound_s"]
MESSAGE_KEYS = ["tensors", "num_bytes", "ready_s", "start_s", "end_s", "channel"]


@pytest.fixture
def files(tmp_path):
    save_trace(TRACE_A, tmp_path / "trace.json")
    save_link(LINK_A, tmp_path / "link.json")
    return {"trace": tmp_path / "trace.json", "link": tmp_path / "link.json"}


def simulated(files, capsys, scheduler):
    simulate(**files, scheduler=scheduler, json="-")
    return json_module.loads(capsys.readouterr().out)


def test_json_has_the_keys_of_the_schema(files, capsys):
    record = simulated(files, capsys, "all")
    assert list(record) == ["schema", "results"]
    assert record["schema"] == "testbed.simulation/1"
    assert [r["scheduler"] for r in record["results"]] == list(ALL)
    for result in record["results"]:
        assert list(result) == RESULT_KEYS
        assert result["num_messages"] == len(result["messages"])
        assert all(list(m) == MESSAGE_KEYS for m in result["messages"])
        assert sum(m["num_bytes"] for m in result["messages"]) == TRACE_A.num_bytes
        assert (result["exposed_s"] is None) == (result["scheduler"] in CROSSING)
        assert result["lower_bound_s"] == 22


@pytest.mark.parametrize(
    ("scheduler", "iteration_s", "exposed_s"),
    [
        ("sequential", 36, 14),
        ("wfbp", 39, 17),
        ("mg-wfbp", 35, 13),
        ("optimal", 29, 7),
        ("pace:window=1", 34, None),
        ("pace", 29, None),
        ("dear", 36, None),
    ],
)
def test_the_worked_example(files, capsys, scheduler, iteration_s, exposed_s):
    (result,) = simulated(files, capsys, scheduler)["results"]
    assert result["iteration_s"] == pytest.approx(iteration_s, abs=1e-9)
    assert result["exposed_s"] == (None if exposed_s is None else pytest.approx(exposed_s))


def test_a_slice_repeats_its_tensor_with_its_own_bytes(files, capsys):
    (result,) = simulated(files, capsys, "p3:slice_elements=3")["results"]
    assert [(m["tensors"], m["num_bytes"]) for m in result["messages"]] == [
        ([4], 3),
        ([3], 3),
        ([3], 1),
        ([2], 1),
        ([1], 1),
        ([0], 1),
    ]


def test_text_shows_the_fastest_first_and_draws_it(files, capsys):
    simulate(**files, scheduler="wfbp,optimal,pace")
    text = capsys.readouterr().out
    rows = text.splitlines()
    assert [row.split()[0] for row in rows[:4]] == ["scheduler", "optimal", "pace", "wfbp"]
    assert "crosses" in rows[2]
    assert text.count("backward   b") == 3
    assert "largest tail first; forward order: a chain" in text


def test_json_goes_to_a_file_beside_the_text(files, capsys, tmp_path):
    simulate(**files, scheduler="dear", json=str(tmp_path / "out.json"))
    assert "dear" in capsys.readouterr().out
    (result,) = decode_simulation((tmp_path / "out.json").read_bytes()).results
    assert [m.tensors for m in result.messages] == [(0, 1, 2, 3, 4)] * 2
    assert [m.num_bytes for m in result.messages] == [5, 5]


def test_saved_plans_are_the_ones_simulated(files, capsys, tmp_path):
    simulate(**files, scheduler="wfbp", plan_out=tmp_path / "one.json")
    simulate(**files, scheduler="wfbp,pace:window=1", plan_out=tmp_path / "plan.json")
    capsys.readouterr()
    wfbp = make_plan("wfbp", TRACE_A, LINK_A)
    assert load_plan(tmp_path / "one.json") == wfbp == load_plan(tmp_path / "plan-wfbp.json")
    pace = load_plan(tmp_path / "plan-pace-window-1.json")
    assert pace == make_plan("pace:window=1", TRACE_A, LINK_A)


def test_options_with_commas_stay_with_their_scheduler():
    specs = scheduler_specs("wfbp,bytescheduler:partition_kib=1,credit_kib=2,all")
    assert specs[:2] == ("wfbp", "bytescheduler:partition_kib=1,credit_kib=2")
    assert len(specs) == 13
    assert len(set(specs)) == 13


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"scheduler": "wfpb"}, UnknownName, "did you mean 'wfbp'"),
        ({"scheduler": ""}, UsageError, "expected name,name,... or all"),
        ({"scheduler": "dear:mb=3"}, UsageError, "known options: mib"),
        ({"trace": "nowhere.json"}, UsageError, "nowhere.json cannot be read"),
        ({"link": "nowhere.json"}, UsageError, "nowhere.json cannot be read"),
    ],
)
def test_wrong_use_is_named(files, changed, error, words):
    with pytest.raises(error, match=words):
        simulate(**files | {"scheduler": "wfbp"} | changed)


def test_as_a_command(files, capsys):
    app = typer.Typer()
    app.command()(simulate)
    arguments = ["--trace", str(files["trace"]), "--link", str(files["link"])]
    app([*arguments, "--scheduler", "wfbp", "--json", "-"], standalone_mode=False)
    assert decode_simulation(capsys.readouterr().out.encode()).results[0].iteration_s == 39


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(traces(max_tensors=5), links)
def test_auto_is_never_above_a_candidate(trace, link):
    auto = predict(make_plan("auto", trace, link), trace, link).iteration_s
    for scheduler in (*WITHIN_BACKWARD, *ACROSS_ITERATIONS):
        assert auto <= predict(make_plan(scheduler, trace, link), trace, link).iteration_s


def test_auto_says_why_and_against_what():
    plan = make_plan("auto", TRACE_A, LINK_A)
    assert plan.reason.startswith("auto chose")
    assert f"of {len(WITHIN_BACKWARD + ACROSS_ITERATIONS)} candidates" in plan.reason
    assert "lower bound of 22 s" in plan.reason


def test_auto_tells_differences_below_the_noise():
    compute_bound = trace_of([10, 10], [1, 1], [5, 5])
    link = link_of(0.01, 0.01)
    assert "smaller than the noise of 3.0%" in make_plan("auto", compute_bound, link).reason
    exact = make_plan("auto:noise=0", compute_bound, link).reason
    assert "smaller than the noise" not in exact


def test_auto_can_stay_within_the_backward_pass():
    trace = trace_of([1] * 4, [50] * 4, [50] * 4)
    link = link_of(1, 1)
    assert make_plan("auto", trace, link).crosses_iteration
    assert not make_plan("auto:crossing=0", trace, link).crosses_iteration


@pytest.mark.parametrize(
    ("option", "extra", "noise"),
    [
        (None, {}, 0.03),
        (None, {"relative_residual_median": 0.1}, 0.1),
        (0.2, {"relative_residual_median": 0.1}, 0.2),
    ],
)
def test_auto_takes_the_noise_from_the_option_or_the_link(option, extra, noise):
    link = msgspec.structs.replace(LINK_A, extra=extra)
    assert noise_of(link, AutoOptions(noise=option)) == noise
