"""Traces, links and plans as files: what goes in comes out; bad files are told what is wrong."""

import json

import msgspec
import pytest

from testbed.base.errors import UnknownName, UsageError
from testbed.base.files import (
    decode_link,
    decode_trace,
    encode_trace,
    load_link,
    load_trace,
    save_link,
    save_trace,
)
from testbed.base.plan import Plan, decode_plan, encode_plan, load_plan
from testbed.base.trace import Trace, TraceTensor
from testbed.prediction.timeline import timeline
from testbed.scheduling.auto import candidate_specs
from testbed.scheduling.protocol import make_plan, needs_profile
from tests.harness.traces import LINK_A, TRACE_A, make_link, make_trace

HUGE, LARGE = (
    Trace(
        name=name,
        device="cpu",
        batch_size=1,
        tensors=(
            TraceTensor(name="w", num_elements=count, dtype="uint8", forward_s=1.0, backward_s=2.0),
        ),
    )
    for name, count in (("huge", 10**12), ("large", 6 * 10**10))
)
LINK = {
    "schema": "testbed.link/1",
    "backend": "gloo",
    "num_workers": 4,
    "latency_s": 1e-4,
    "seconds_per_byte": 1e-9,
}
TENSOR = {
    "name": "w",
    "num_elements": 10,
    "dtype": "float16",
    "forward_s": 1,
    "backward_s": 2.5,
}
TRACE = {
    "schema": "testbed.trace/1",
    "name": "toy",
    "device": "cpu",
    "batch_size": 8,
    "tensors": [TENSOR, TENSOR | {"name": "v"}],
}


def test_five_keys_make_a_link(tmp_path):
    path = tmp_path / "link.json"
    path.write_text(json.dumps(LINK))
    link = load_link(path)
    assert link.time_s(1000) == pytest.approx(1.01e-4)
    assert [link.slowdown(k) for k in (1, 2, 3)] == [1, 2, 3]
    save_link(link, path)
    assert json.loads(path.read_text()) == LINK


def test_unknown_keys_survive(tmp_path):
    raw = TRACE | {
        "commit": "abc",
        "extra": {"a": 1},
        "tensors": [TENSOR | {"activation_bytes": 7}, TENSOR],
        "consumers": [[1], []],
    }
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(raw))
    trace = load_trace(path)
    assert trace.ready_s() == [5.0, 2.5]
    assert trace.num_bytes == 40
    assert trace.consumers == ((1,), ())
    save_trace(trace, path)
    assert json.loads(path.read_text()) == raw
    assert load_trace(path) == trace
    pieces = [
        {"max_bytes": 100, "latency_s": 0, "seconds_per_byte": 0.5, "residual": 0.1},
        {"max_bytes": None, "latency_s": 1, "seconds_per_byte": 0.25},
    ]
    raw = LINK | {"pieces": pieces, "concurrency_slowdown": [1, 1.5], "note": "x"}
    path.write_text(json.dumps(raw))
    link = load_link(path)
    assert (link.time_s(100), link.time_s(200)) == (50, 51)
    save_link(link, path)
    assert json.loads(path.read_text()) == raw


def test_a_shorter_list_drops_what_belonged_to_its_members():
    trace = decode_trace(json.dumps(TRACE | {"tensors": [TENSOR | {"x": 1}, TENSOR]}).encode())
    shorter = msgspec.structs.replace(trace, tensors=trace.tensors[:1])
    assert json.loads(encode_trace(shorter))["tensors"] == [TENSOR]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": "testbed.trace/2"}, "'schema' is 'testbed.trace/2'; expected 'testbed.trace"),
        ({"tensors": []}, "'tensors' is empty"),
        ({"batch_size": 0}, "'batch_size' is 0; expected 1"),
        ({"batch_size": "8"}, r"Expected `int`, got `str` - at `\$.batch_size`"),
        ({"tensors": [TENSOR | {"dtype": "int3"}]}, "tensor 0.*'dtype' is 'int3'; expected one of"),
        ({"tensors": [TENSOR | {"backward_s": -1}]}, "tensor 0.*'backward_s' is -1"),
        ({"tensors": [{"name": "w"}]}, r"missing required field `num_elements`.*tensors\[0\]"),
        ({"tensors": 3}, r"Expected `array`, got `int` - at `\$.tensors`"),
        ({"consumers": [[1]]}, "'consumers' has 1 entries; expected one per tensor, 2"),
        ({"consumers": [[2], []]}, r"consumers of tensor 0: 2; expected 0 \.\. 1"),
    ],
)
def test_bad_traces(change, words):
    with pytest.raises(UsageError, match=r"t\.json: .*" + words):
        decode_trace(json.dumps(TRACE | change).encode(), "t.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_workers": 0}, "'num_workers' is 0; expected 1"),
        ({"latency_s": -1}, "'latency_s' is -1"),
        ({"seconds_per_byte": None}, "Expected `float`, got `null`"),
        ({"concurrency_slowdown": [2, 3]}, "'concurrency_slowdown'.*the first of them 1"),
        ({"concurrency_slowdown": []}, "'concurrency_slowdown'"),
        ({"concurrency_slowdown": [1, 0]}, "factors above 0"),
        ({"pieces": []}, "'pieces'"),
        ({"pieces": [{"max_bytes": 9, "latency_s": 0, "seconds_per_byte": 0}]}, "null in the last"),
        ({"pieces": [{"latency_s": 0, "seconds_per_byte": -1}]}, "piece 0: 'seconds_per_byte'"),
    ],
)
def test_bad_links(change, words):
    with pytest.raises(UsageError, match=r"l\.json: .*" + words):
        decode_link(json.dumps(LINK | change).encode(), "l.json")


@pytest.mark.parametrize("load", [load_trace, load_link, load_plan])
def test_files_that_are_none(load, tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        load(tmp_path / "absent.json")
    path = tmp_path / "text"
    for text, words in (("no", "is no JSON"), ("[]", "'schema' is 'list'"), ("{}", "'schema'")):
        path.write_text(text)
        with pytest.raises(UsageError, match=words):
            load(path)


@pytest.mark.parametrize("spec", ["wfbp", "asc-wfbp:channels=3", "cycle:ms=5", "osf"])
def test_plans_come_back_equal(spec, tmp_path):
    plan = make_plan(spec, TRACE_A, LINK_A)
    (tmp_path / "plan.json").write_bytes(encode_plan(plan))
    again = load_plan(tmp_path / "plan.json")
    assert again == plan
    assert again.digest() == plan.digest()
    assert timeline(again, TRACE_A, LINK_A) == timeline(plan, TRACE_A, LINK_A)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_channels": 0}, "'num_channels' is 0"),
        ({"dtypes": ["int8"] * 5}, r"dtypes \['int8'\] are unknown"),
        ({"names": ["a"]}, "differ in length"),
        ({"messages": []}, r"tensor 0 \('t0'\): slices end at none; expected to cover 1"),
        ({"messages": [{"parts": [[0, 0, 1]], "channel": 1}]}, "message 0 is on channel 1"),
        ({"messages": [{"parts": [[9, 0, 1]]}]}, "message 0 has tensor 9"),
        (
            {"messages": [{"parts": [[0, 0, 1], [0, 0, 1]]}]},
            "slice 0:1 follows element 1",
        ),
        ({"credit_bytes": 0}, "'credit_bytes' is 0; expected 1 or more"),
        ({"credit_bytes": -5}, "'credit_bytes' is -5"),
        ({"tick_s": 1e-300}, "'tick_s' is 1e-300"),
        ({"order": "lifo"}, "Invalid enum value 'lifo'"),
        ({"dtypes": ["uint8", "float16", "uint8", "uint8", "uint8"]}, "mixes dtypes"),
    ],
)
def test_bad_plans(change, words):
    raw = json.loads(encode_plan(make_plan("sequential", TRACE_A, LINK_A))) | change
    with pytest.raises(UsageError, match=r"p\.json: .*" + words):
        decode_plan(json.dumps(raw).encode(), "p.json")


def test_plan_of_another_model_is_refused():
    plan = make_plan("wfbp", TRACE_A, LINK_A)
    with pytest.raises(UsageError, match="the plan has 5 tensors, trace 'toy' 1"):
        timeline(plan, make_trace([1], [1]), LINK_A)
    other = make_trace([2, 2, 3, 3, 5], [3, 4, 1, 1, 2])
    with pytest.raises(UsageError, match=r"tensor 0 is \('t0', 1, 'uint8'\) in the plan"):
        timeline(plan, other, LINK_A)


def test_plan_that_crosses_is_refused():
    plan: Plan = msgspec.structs.replace(
        make_plan("wfbp", TRACE_A, LINK_A), crosses_iteration=True, order="priority"
    )
    with pytest.raises(UsageError, match="crosses the iteration boundary"):
        timeline(plan, TRACE_A, LINK_A)


@pytest.mark.parametrize(
    "spec",
    [
        "bucket:mib=-1",
        "bucket:mib=nan",
        "bucket:timeout_ms=0",
        "cycle:ms=-1",
        "cycle:ms=inf",
        "cycle:ms=nan",
        "cycle:mib=nan",
        "cycle:ms=1e-300",
        "cycle:ms=0.0009",
        "asc-wfbp:channels=0",
        "optimal:channels=0",
        "osf:rule=best",
        "wfbp:mib=3",
    ],
)
def test_bad_options(spec):
    with pytest.raises(UsageError, match=spec.split(":")[0]):
        make_plan(spec, TRACE_A, LINK_A)


def test_unknown_names():
    with pytest.raises(UnknownName, match="did you mean 'wfbp'"):
        make_plan("wfpb", TRACE_A, LINK_A)


def test_dtypes_never_share_a_message():
    trace = make_trace([1, 1, 1, 1], [4, 4, 4, 4], dtypes=["float32", "float16"] * 2)
    plan = make_plan("sequential", trace, make_link(1))
    assert [[p.tensor for p in m.parts] for m in plan.messages] == [[3, 1], [2, 0]]


@pytest.mark.parametrize(
    ("spec", "times"),
    [
        ("bucket", False),
        ("bucket:mib=4,first_mib=1", False),
        ("bucket:timeout_ms=none", False),
        ("bucket:timeout_ms=5", True),
        ("dear", False),
        ("cycle", True),
        ("auto", True),
    ],
)
def test_who_plans_from_times(spec, times):
    assert needs_profile(spec) is times


def test_the_shortest_period_ends():
    assert make_plan("cycle:ms=0.001", TRACE_A, LINK_A).tick_s == pytest.approx(1e-6)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("p3", "p3: slice_elements cuts 'huge' into 20000000 messages"),
        ("bytescheduler:partition_kib=64", "bytescheduler: partition_kib cuts"),
        ("pace:segment_kib=64", "pace: segment_kib cuts"),
    ],
)
def test_too_many_slices_are_refused(spec, words):
    with pytest.raises(UsageError, match=words + ".*raise it"):
        make_plan(spec, HUGE, LINK_A)


def test_auto_passes_over_who_cuts_too_much():
    plan = make_plan("auto", LARGE, LINK_A)
    num_candidates = len(candidate_specs(LARGE, True))
    assert f"of {num_candidates - 1} candidates" in plan.reason
    with pytest.raises(UsageError, match="p3: slice_elements"):
        make_plan("p3", LARGE, LINK_A)
