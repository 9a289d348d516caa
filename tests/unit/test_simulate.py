"""`testbed simulate` as a user calls it: files in, table or JSON out."""

import json as json_module
import re
from math import inf, nan
from pathlib import Path

import msgspec
import pytest
import typer
from hypothesis import HealthCheck, given, settings

from testbed.base.errors import UnknownName, UsageError
from testbed.base.files import save_link, save_trace
from testbed.base.plan import load_plan
from testbed.commands.simulate import scheduler_specs, simulate
from testbed.prediction.algorithms import Ring
from testbed.prediction.cross_iteration import predict
from testbed.prediction.extrapolate import extrapolate
from testbed.records.simulation import Simulation
from testbed.scheduling.auto import AutoOptions, candidate_specs, noise_of
from testbed.scheduling.protocol import make_plan
from testbed.simulation import Wanted, at_workers
from tests.unit.crossing_cases import LINK_A, TRACE_A, link_of, links, trace_of, traces

RATE = re.compile(r"([0-9.]+) ([GMk])bit/s")
CROSSING = {"pace", "bytescheduler", "p3", "dear"}
RESULT_KEYS = [
    *("scheduler", "num_messages", "messages", "iteration_s", "exposed_s", "lower_bound_s"),
    *("num_workers", "scaling_factor", "speedup"),
]
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
    assert list(record) == ["schema", "prediction", "results"]
    assert record["prediction"] == "held-out"
    assert record["schema"] == "testbed.simulation/1"
    assert [r["scheduler"] for r in record["results"]] == list(scheduler_specs("all"))
    for result in record["results"]:
        assert list(result) == RESULT_KEYS
        assert result["num_messages"] == len(result["messages"])
        assert all(list(m) == MESSAGE_KEYS for m in result["messages"])
        assert sum(m["num_bytes"] for m in result["messages"]) == TRACE_A.num_bytes
        assert (result["exposed_s"] is None) == (result["scheduler"] in CROSSING)
        assert result["lower_bound_s"] == 22
        assert result["num_workers"] == LINK_A.num_workers
        assert result["scaling_factor"] == pytest.approx(22 / result["iteration_s"])
        assert result["speedup"] == pytest.approx(result["scaling_factor"] * LINK_A.num_workers)


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
    head, empty, *rows = text.splitlines()
    assert "workers: " in head
    assert empty == ""
    assert [row.split()[0] for row in rows[:4]] == ["scheduler", "optimal", "pace", "wfbp"]
    assert "crosses" in rows[2]
    assert text.count("backward   b") == 3
    assert len({line.partition(";")[0] for line in rows if line.startswith("0 .. ")}) == 1
    assert "largest tail first; forward order: a chain" in text


def test_json_goes_to_a_file_beside_the_text(files, capsys, tmp_path):
    simulate(**files, scheduler="dear", json=str(tmp_path / "out.json"))
    assert "dear" in capsys.readouterr().out
    (result,) = msgspec.json.decode((tmp_path / "out.json").read_bytes(), type=Simulation).results
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
        ({"trace": "nowhere.json"}, UsageError, "'nowhere.json': no such file.*resnet50-v100"),
        ({"link": "nowhere.json"}, UsageError, "nowhere.json cannot be read"),
        (
            {"json": "/nonexist/x.json"},
            UsageError,
            "--json is '/nonexist/x.json', but there is no folder",
        ),
        ({"json": "/"}, UsageError, "--json is '/', a folder"),
        (
            {"plan_out": Path("/nonexist/x.json")},
            UsageError,
            "--plan-out is '/nonexist/x.json', but",
        ),
        ({"slowest_worker": nan}, UsageError, "slowest worker's factor is nan"),
        ({"slowest_worker": inf}, UsageError, "slowest worker's factor is inf"),
        ({"slowest_worker": 0.0}, UsageError, "slowest worker's factor is 0"),
        ({"slowest_worker": -1.0}, UsageError, "slowest worker's factor is -1"),
        ({"slowest_link": nan}, UsageError, "bandwidth factor is nan"),
        ({"slowest_link": inf}, UsageError, "bandwidth factor is inf"),
        ({"overlap_slowdown": nan, "factors": True}, UsageError, "--overlap-slowdown is nan"),
    ],
)
def test_wrong_use_is_named(files, changed, error, words):
    with pytest.raises(error, match=words):
        simulate(**files | {"scheduler": "wfbp"} | changed)


def test_where_to_write_is_checked_before_anything_is_computed(files, tmp_path):
    for wrong in ({"json": "/nonexist/x.json"}, {"plan_out": Path("/nonexist/x.json")}):
        with pytest.raises(UsageError, match="there is no folder"):
            simulate(trace="nowhere.json", link=Path("nowhere.json"), **wrong)


def test_as_a_command(files, capsys):
    app = typer.Typer()
    app.command()(simulate)
    arguments = ["--trace", str(files["trace"]), "--link", str(files["link"])]
    app([*arguments, "--scheduler", "wfbp", "--json", "-"], standalone_mode=False)
    found = msgspec.json.decode(capsys.readouterr().out.encode(), type=Simulation)
    assert found.results[0].iteration_s == 39


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(traces(max_tensors=5), links)
def test_auto_is_never_above_a_candidate(trace, link):
    auto = predict(make_plan("auto", trace, link), trace, link).iteration_s
    for scheduler in candidate_specs(trace, True):
        assert auto <= predict(make_plan(scheduler, trace, link), trace, link).iteration_s


def test_auto_tries_what_schedulers_declare_from_the_simplest_on():
    within = candidate_specs(TRACE_A, False)
    assert " ".join(within) == (
        "sequential wfbp bucket bucket:mib=4,first_mib=1 bucket:mib=8,first_mib=1 cycle mg-wfbp "
        "osf optimal asc-wfbp asc-wfbp:channels=4"
    )
    across = candidate_specs(TRACE_A, True)[len(within) :]
    assert " ".join(across) == (
        "dear dear:mib=4 dear:mib=8 bytescheduler "
        "bytescheduler:partition_kib=4096,credit_kib=16384 "
        "bytescheduler:partition_kib=8192,credit_kib=32768 p3 pace:segment_kib=1024 pace "
        "pace:segment_kib=16384"
    )
    many = trace_of([1] * 1001, [1] * 1001, [1] * 1001)
    assert candidate_specs(many, True)[-2:] == ("p3", "pace")


def test_auto_says_why_and_against_what():
    plan = make_plan("auto", TRACE_A, LINK_A)
    assert plan.reason.startswith("auto chose")
    assert f"of {len(candidate_specs(TRACE_A, True))} candidates" in plan.reason
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
    for option in ("cross_iteration=0", "crossing=0"):  # the second: former name
        assert not make_plan(f"auto:{option}", trace, link).crosses_iteration


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


def outlook(files, capsys, **options):
    simulate(**files, json="-", **options)
    return json_module.loads(capsys.readouterr().out)


def test_other_numbers_of_workers(files, capsys):
    record = outlook(files, capsys, scheduler="wfbp,optimal", workers="2:8")
    assert [(r["num_workers"], r["scheduler"]) for r in record["results"]] == [
        (n, s) for n in (2, 4, 8) for s in ("wfbp", "optimal")
    ]
    of_eight = extrapolate(LINK_A, Ring(), 8)
    expected = predict(make_plan("optimal", TRACE_A, of_eight), TRACE_A, of_eight)
    assert record["results"][-1]["iteration_s"] == expected.iteration_s
    assert "break_even" not in record
    assert "factors" not in record


def test_factors_and_break_even_go_into_the_record(files, capsys):
    record = outlook(files, capsys, scheduler="mg-wfbp,pace", factors=True, break_even=True)
    (found,) = record["factors"]
    assert (found["scheduler"], found["startup_s"], found["tail_s"]) == ("mg-wfbp", 8, 5)
    assert [b["scheduler"] for b in record["break_even"]] == ["mg-wfbp", "pace"]


def test_factors_explain_the_iteration_of_the_first_table_or_are_left_out_by_name(files, capsys):
    every = "mg-wfbp,wfbp,sequential,cycle,bucket,dear,p3"
    simulate(**files, scheduler=every, factors=True, workers="2,4")
    words = capsys.readouterr().out
    for left_out in ("cycle", "dear", "p3"):
        assert f"{left_out} (2, 4 workers)" in words
    record = outlook(files, capsys, scheduler=every, factors=True, workers="2,4")
    simulated = {(r["scheduler"], r["num_workers"]): r["iteration_s"] for r in record["results"]}
    explained = {found["scheduler"] for found in record["factors"]}
    assert explained == {"mg-wfbp", "wfbp", "bucket", "sequential"}
    for found in record["factors"]:
        expected = simulated[found["scheduler"], found["num_workers"]]
        assert found["iteration_s"] == pytest.approx(expected, rel=1e-9)


def test_stragglers_and_slow_interfaces(files, capsys):
    (plain,) = outlook(files, capsys, scheduler="sequential")["results"]
    (straggling,) = outlook(files, capsys, scheduler="sequential", slowest_worker=2.0)["results"]
    (narrow,) = outlook(files, capsys, scheduler="sequential", slowest_link=0.5)["results"]
    assert straggling["iteration_s"] == plain["iteration_s"] + 22
    assert straggling["scaling_factor"] == pytest.approx(22 / (plain["iteration_s"] + 22))
    assert narrow["iteration_s"] == plain["iteration_s"] + 10


def test_tables_and_curves_over_workers(files, capsys, tmp_path):
    for name in ("curves.html", "curves.svg"):
        simulate(
            **files,
            scheduler="wfbp,optimal",
            workers="2,4,16",
            plot=tmp_path / name,
            check_link=[files["link"]],
            break_even=True,
            factors=True,
        )
        assert (tmp_path / name).read_text().count("<polyline") == 7
    text = capsys.readouterr().out
    assert "at other numbers of workers as ring" in text
    assert f"held out: {LINK_A.num_workers} workers" in text
    for title in ("iteration", "scaling factor", "speed-up", "worth it"):
        assert any(line.startswith(title) for line in text.splitlines())
    (row,) = {line for line in text.splitlines() if line.startswith("iteration")}
    assert row.split()[1:] == ["2", "4", "16"]


def test_nodes_are_named_and_needed_inside_them(files, capsys, tmp_path):
    for name, link in (("link", LINK_A), ("node", link_of(0.5, 0.125))):
        count = {"link": 8, "node": 2}[name]
        save_link(msgspec.structs.replace(link, num_workers=count), tmp_path / f"{name}.json")
    simulate(**files, scheduler="wfbp", workers="2,8", node_link=tmp_path / "node.json")
    assert "as ring, nodes of 2 ranks" in capsys.readouterr().out


def test_plans_at_several_numbers_of_workers_have_files_of_their_own(files, capsys, tmp_path):
    simulate(**files, scheduler="wfbp", workers="2,4", plan_out=tmp_path / "plan.json")
    capsys.readouterr()
    assert {p.name for p in tmp_path.glob("plan*")} == {"plan-wfbp-2.json", "plan-wfbp-4.json"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": "8:2"}, "--workers is '8:2'"),
        ({"workers": "2,x"}, "--workers is '2,x'"),
        ({"workers": "2,2"}, "different numbers"),
        ({"workers": "0:4"}, "from 1 on"),
        ({"plot": Path("curves.png")}, r"ends in .html or .svg"),
        ({"plot": Path("nowhere/curves.svg")}, "make it first"),
        ({"overlap_slowdown": -1.0, "factors": True}, "--overlap-slowdown is -1"),
        ({"slowest_worker": 0.5}, "expected 1 or more"),
        ({"slowest_link": 0.0}, "expected above 0"),
        ({"workers": "2", "algorithm": "rings"}, "did you mean 'ring'"),
        ({"overlap_slowdown": 0.3}, "--overlap-slowdown given without --factors"),
        ({"node_link": Path("node.json")}, "--node-link given without --workers"),
    ],
)
def test_wrong_outlooks_are_named(files, options, words):
    with pytest.raises(UsageError, match=words):
        simulate(**files, scheduler="wfbp", **options)


def rates_of(text):
    """Words that are rates in the line of the scheduler that is worth it."""
    (line,) = [line for line in text.splitlines() if line.startswith("mg-wfbp") and "bit/s" in line]
    return [float(n) * {"G": 1e9, "M": 1e6, "k": 1e3}[u] for n, u in RATE.findall(line)]


def test_break_even_rates_are_of_the_interface_that_a_node_s_ranks_share(capsys, tmp_path):
    trace = {"trace": "resnet50-v100", "workers": "16", "break_even": True, "scheduler": "mg-wfbp"}
    node = msgspec.structs.replace(link_of(1e-6, 1e-12), num_workers=4)
    save_link(node, tmp_path / "node.json")
    # Of 16 ranks in nodes of 4 an interface carries what a ring through 4 does.
    for name, count, per_byte in (("flat", 4, 6e-10), ("nodes", 16, 6.01e-10)):
        link = msgspec.structs.replace(link_of(3e-4, per_byte), num_workers=count, backend="gloo")
        save_link(link, tmp_path / f"{name}.json")
    simulate(**(trace | {"workers": "4"}), link=tmp_path / "flat.json")
    flat = rates_of(capsys.readouterr().out)
    simulate(**trace, link=tmp_path / "nodes.json", node_link=tmp_path / "node.json")
    shared = rates_of(capsys.readouterr().out)
    assert len(flat) >= 2
    assert shared == pytest.approx(flat, rel=0.1)


def test_a_link_of_no_time_a_byte_has_a_table_of_break_evens(files, capsys, tmp_path):
    save_link(link_of(0.5, 0.0), tmp_path / "link.json")
    simulate(**files, scheduler="mg-wfbp", break_even=True)
    row = [r for r in capsys.readouterr().out.splitlines() if r.startswith("mg-wfbp")][-1]
    assert row.split()[-1] == "never"  # sequential has the fewest start-ups


def test_nominal_numbers_are_of_the_algorithm_between_nodes(tmp_path):
    node = msgspec.structs.replace(link_of(1e-5, 1e-10), num_workers=4)
    save_link(node, tmp_path / "node.json")
    wanted = outlook_of(
        "rate=10gbit,latency=50us,headers=1", (8, 16), node_link=tmp_path / "node.json"
    )
    for link, nodes in zip(wanted.links, (2, 4), strict=True):
        ring = Ring()
        assert link.latency_s == pytest.approx(1e-5 + ring.startups(nodes) * 50e-6)
        assert link.seconds_per_byte == pytest.approx(1e-10 + ring.transfers(nodes) * 8e-10)


def test_the_algorithm_that_was_given_is_told_where_the_first_link_is_within_a_node(tmp_path):
    node = msgspec.structs.replace(link_of(1e-5, 1e-10), num_workers=4, backend="elsewhere")
    save_link(node, tmp_path / "node.json")
    across = msgspec.structs.replace(link_of(3e-4, 7e-10), num_workers=16, backend="gloo")
    save_link(across, tmp_path / "across.json")
    nodes = tmp_path / "node.json"
    wanted = outlook_of(tmp_path / "across.json", (4, 64), algorithm="tree", node_link=nodes)
    assert wanted.algorithm_words == "tree, nodes of 4 ranks"
    assert wanted.algorithm.transfers(16) == 2
    nominal = "rate=10gbit,latency=50us,workers=4"
    simulation, _ = at_workers(outlook_of(nominal, (4, 8), node_link=nodes))
    assert simulation.prediction == "null"
    with pytest.raises(UsageError, match="all in one node; give --workers above 4"):
        outlook_of(nominal, None, node_link=nodes)


def test_schedulers_go_by_the_algorithm_that_was_given(files, tmp_path):
    nominal = "rate=10gbit,latency=50us"
    for spec in ("p3", "bytescheduler"):
        plans = [
            make_plan(spec, TRACE_A, outlook_of(nominal, (8,), algorithm=given).links[0])
            for given in ("ring", "server")
        ]
        assert plans[0] != plans[1], spec
    unknown = tmp_path / "unknown.json"
    save_link(msgspec.structs.replace(LINK_A, backend="elsewhere"), unknown)
    link = outlook_of(unknown, None, algorithm="ring").links[0]
    assert make_plan("omgs", TRACE_A, link).messages


def test_one_worker_may_be_asked_for_alone():
    (link,) = outlook_of("rate=10gbit,latency=50us", (1,)).links
    assert link.time_s(1e6) == 0.0


def outlook_of(link, workers, **given):
    plain = {
        "algorithm": None, "node_link": None, "check_links": (), "slowest_worker": 1.0,
        "slowest_link": 1.0, "break_even": False, "factors": False, "overlap_slowdown": 0.0,
    }  # fmt: skip
    return Wanted.of("resnet50-v100", link, ("wfbp",), workers, **(plain | given))
