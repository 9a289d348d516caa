"""Worked examples on one trace of five tensors (units: seconds and bytes; a = 4, b = 1)."""

import csv
from pathlib import Path

import pytest

from testbed.base.errors import UsageError
from testbed.base.link import Link
from testbed.prediction.contention import SharedLink, first_in_first_out
from testbed.prediction.factors import scaling
from testbed.prediction.timeline import Backward, Ticks, serial_end_s, timeline
from testbed.scheduling.asc_wfbp import admit, asc_stops
from testbed.scheduling.bucket import MIB
from testbed.scheduling.build import (
    add_then_close,
    close_before_exceed,
    close_on_timeout,
    groups_of,
    stops_of,
)
from testbed.scheduling.cycle import cycle_stops
from testbed.scheduling.mg_wfbp import merge_streaming
from testbed.scheduling.optimal import optimal_stops
from testbed.scheduling.osf import global_stops, message_stops, schedule_stops
from testbed.scheduling.protocol import make_plan
from tests.harness.synthetic import synthetic_trace
from tests.harness.traces import (
    LINK_A,
    SLOWDOWN,
    TRACE_A,
    exposed_by_backlog_s,
    make_link,
    make_trace,
)

BACKWARD_A = Backward.of(TRACE_A)
GOLDEN = Path(__file__).parent.parent / "golden" / "scheduling_exposed.csv"


@pytest.mark.parametrize(
    ("spec", "groups", "times", "factor"),
    [
        ("wfbp", [[4], [3], [2], [1], [0]], [(2, 9), (9, 17), (17, 22), (22, 27), (27, 32)], 0.564),
        ("sequential", [[4, 3, 2, 1, 0]], [(15, 29)], 0.611),
        ("mg-wfbp", [[4, 3, 2, 1], [0]], [(10, 23), (23, 28)], 0.629),
        ("asc-wfbp:channels=1", [[4], [3, 2], [1, 0]], [(2, 9), (9, 18), (18, 24)], 0.710),
        ("optimal", [[4, 3], [2, 1, 0]], [(4, 15), (15, 22)], 0.759),
        ("osf:rule=exact", [[4, 3], [2, 1, 0]], [(4, 15), (15, 22)], 0.759),
        ("asc-wfbp", [[4], [3, 2], [1, 0]], [(2, 9), (7, 16), (15, 21)], 0.786),
    ],
)
def test_groups_and_times(spec, groups, times, factor):
    plan = make_plan(spec, TRACE_A, LINK_A)
    line = timeline(plan, TRACE_A, LINK_A)
    assert [list(s.tensors) for s in line.spans] == groups
    assert [(s.start_s, s.end_s) for s in line.spans] == times
    assert line.exposed_s == times[-1][1] - 15
    assert line.iteration_s == 7 + times[-1][1]
    assert line.lower_bound_s == 22
    assert 22 / line.iteration_s == pytest.approx(factor, abs=5e-4)


def test_two_channels_are_used_where_messages_overlap():
    line = timeline(make_plan("asc-wfbp", TRACE_A, LINK_A), TRACE_A, LINK_A)
    assert [s.channel for s in line.spans] == [0, 1, 0]


@pytest.mark.parametrize(
    ("limit", "add", "exceed"),
    [(1, 32, 32), (3, 24, 24), (4, 22, 24), (7, 22, 22), (8, 25, 25), (9, 28, 28), (10, 29, 29)],
)
def test_fixed_buckets(limit, add, exceed):
    sizes = BACKWARD_A.num_bytes
    assert serial_end_s(BACKWARD_A, add_then_close(sizes, limit), LINK_A) == add
    assert serial_end_s(BACKWARD_A, close_before_exceed(sizes, limit), LINK_A) == exceed
    mib = limit / MIB
    plan = make_plan(f"bucket:mib={mib!r},first_mib={mib!r}", TRACE_A, LINK_A)
    assert timeline(plan, TRACE_A, LINK_A).exposed_s == add - 15


def test_bucket_that_exceeds_at_5():
    stops = close_before_exceed(BACKWARD_A.num_bytes, 5)
    assert serial_end_s(BACKWARD_A, stops, LINK_A) == 24


def test_first_bucket_is_smaller():
    assert add_then_close([1, 1, 1, 1, 1, 1], 3, 1) == [1, 4, 6]
    assert add_then_close([], 3) == []


def test_the_first_bucket_is_no_larger_than_the_others():
    (_, *sizes) = [len(m.parts) for m in make_plan("bucket:mib=0", TRACE_A, LINK_A).messages]
    assert sizes == [1, 1, 1, 1]


def test_more_channels_than_messages_change_nothing():
    found, many = (make_plan(f"optimal:channels={n}", TRACE_A, LINK_A) for n in (5, 4096))
    assert [m.parts for m in found.messages] == [m.parts for m in many.messages]


@pytest.mark.parametrize(
    "spec", ["bytescheduler:credit_kib=1e306", "pace:segment_kib=1e306", "dear:mib=1e303"]
)
def test_sizes_that_no_number_of_bytes_holds_are_refused(spec):
    with pytest.raises(UsageError, match=r"is 1e\+30[36]; expected"):
        make_plan(spec, TRACE_A, LINK_A)


def test_a_tensor_above_the_limit_is_alone():
    assert groups_of(close_before_exceed([1, 9, 1, 1], 3), 4) == [[3], [2], [1, 0]]


def test_buckets_with_timeout():
    stops = close_on_timeout(BACKWARD_A.ready_s, BACKWARD_A.num_bytes, float("inf"), 5)
    assert stops == [3, 5]
    assert serial_end_s(BACKWARD_A, stops, LINK_A) == 25
    plan = make_plan("bucket:timeout_ms=5000", TRACE_A, LINK_A)
    assert stops_of(plan) == [3, 5]


@pytest.mark.parametrize(
    ("limit", "blocking", "stops", "end_s"),
    [
        (4, 1, [1, 2, 5], 27),
        (4, 0, [1, 2, 4, 5], 31),
        (8, 1, [2, 5], 23),
        (8, 0, [2, 4, 5], 27),
    ],
)
def test_cycle(limit, blocking, stops, end_s):
    assert cycle_stops(BACKWARD_A, LINK_A, limit, Ticks(5, bool(blocking))) == stops
    spec = f"cycle:mib={limit / MIB!r},ms=5000,blocking={blocking}"
    line = timeline(make_plan(spec, TRACE_A, LINK_A), TRACE_A, LINK_A)
    assert line.exposed_s == end_s - 15


def test_blocking_cycle_times():
    plan = make_plan(f"cycle:mib={4 / MIB!r},ms=5000", TRACE_A, LINK_A)
    spans = timeline(plan, TRACE_A, LINK_A).spans
    assert [(s.start_s, s.end_s) for s in spans] == [(5, 12), (12, 20), (20, 27)]


def test_cycle_without_period_is_a_ready_queue():
    stops = cycle_stops(BACKWARD_A, LINK_A, float("inf"), Ticks(0, True))
    assert stops == [1, 3, 5]
    assert serial_end_s(BACKWARD_A, stops, LINK_A) == 24


def test_tick_on_the_grid_is_not_missed_by_rounding():
    ticks = Ticks(0.1, False)
    for step in range(1, 400):
        assert ticks.at_or_after(0.0, step * 0.1) == step * 0.1
        assert ticks.at_or_after(0.0, step * 0.1 - 0.05) == step * 0.1


def test_the_paper_rule_is_not_monotone_in_the_start_up():
    trace = make_trace([1, 4, 8, 4], [5, 9, 7, 7])
    ends = {}
    for latency_s in (4, 5):
        link = make_link(latency_s)
        ends[latency_s] = serial_end_s(
            Backward.of(trace), merge_streaming(Backward.of(trace), link), link
        )
    assert ends == {4: 44, 5: 43}


@pytest.mark.parametrize(("count", "end_s"), [(1, 9), (2, 15), (3, 18), (4, 20), (5, 22)])
def test_prefixes_of_the_dynamic_program(count, end_s):
    backward = Backward(BACKWARD_A.ready_s[:count], BACKWARD_A.num_bytes[:count])
    assert serial_end_s(backward, optimal_stops(backward, LINK_A), LINK_A) == end_s


def test_osf_rules():
    assert global_stops(BACKWARD_A, LINK_A) == [2, 5]
    for rule in (message_stops, schedule_stops):
        assert serial_end_s(BACKWARD_A, rule(BACKWARD_A, LINK_A), LINK_A) == 22


def test_scaling_names_its_terms():
    stops = merge_streaming(BACKWARD_A, LINK_A)
    found = scaling(TRACE_A, stops, LINK_A)
    assert (found.startup_s, found.transfer_s) == (8, 10)
    assert (found.head_delay_s, found.tail_s, found.exposed_s) == (10, 5, 13)
    assert found.best_scaling_factor == pytest.approx(22 / (7 + 28))
    assert exposed_by_backlog_s(BACKWARD_A, stops, LINK_A) == 13
    assert exposed_by_backlog_s(BACKWARD_A, [2, 5], LINK_A) == 7
    assert found.in_words() == (
        "scaling factor 0.629 with 2 messages: 13 s exposed; start-ups 8 s, transfers 10 s, "
        "first message waits 10 s, last one takes 5 s"
    )


def test_simultaneous_messages():
    two = first_in_first_out([0, 0], [(4, 10), (4, 10)], 2, LINK_A.slowdown)
    assert two.end_s == [19, 19]
    assert first_in_first_out([0, 3], [(4, 10), (4, 4)], 2, LINK_A.slowdown).end_s == [16, 13]
    plain = admit(BACKWARD_A, [1, 2, 3, 4, 5], LINK_A, 2)
    assert list(zip(plain.start_s, plain.end_s, strict=True)) == [
        (2, 9.5),
        (4, 12.5),
        (9.5, 14.5),
        (12.5, 17.5),
        (15, 20),
    ]


def test_shared_link_takes_no_leap():
    shared = SharedLink(LINK_A.slowdown)
    shared.start("x", 4.0, 10.0)
    with pytest.raises(ValueError, match="between 0"):
        shared.advance(5.0)
    with pytest.raises(ValueError, match="under way already"):
        shared.start("x", 1.0, 1.0)


def test_asc_groups():
    assert asc_stops(BACKWARD_A, LINK_A) == [1, 3, 5]
    channels = {
        n: make_plan(f"asc-wfbp:channels={n}", TRACE_A, LINK_A).num_channels for n in (2, 9)
    }
    assert channels == {2: 2, 9: 3}  # none that no message would travel on


def golden_rows():
    with GOLDEN.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("row", golden_rows(), ids=lambda r: f"{r['model']}-{r['latency_s']}")
def test_exposed_times_of_well_known_models(row):
    trace = synthetic_trace(row["model"], float(row["backward_s"]))
    link = Link(
        backend="x",
        num_workers=16,
        latency_s=float(row["latency_s"]),
        seconds_per_byte=float(row["seconds_per_byte"]),
        concurrency_slowdown=SLOWDOWN,
    )
    specs = {s: s for s in ("wfbp", "sequential", "mg-wfbp", "optimal")}
    specs |= {"asc_serial": "asc-wfbp:channels=1", "asc": "asc-wfbp"}
    plans = {column: make_plan(spec, trace, link) for column, spec in specs.items()}
    exposed = {c: timeline(p, trace, link).exposed_s for c, p in plans.items()}
    assert {c: f"{e:.5f}" for c, e in exposed.items()} == {c: f"{float(row[c]):.5f}" for c in specs}
    for column, counted in (("mg-wfbp", "mg"), ("asc", "asc"), ("optimal", "optimal")):
        assert len(plans[column].messages) == int(row[f"{counted}_groups"])


@pytest.mark.parametrize(
    ("model", "num_tensors", "num_parameters"),
    [
        ("resnet50", 161, 25_557_032),
        ("resnet101", 314, 44_549_160),
        ("resnet152", 467, 60_192_808),
        ("bert-base", 199, 109_482_240),
    ],
)
def test_synthetic_models_have_the_published_sizes(model, num_tensors, num_parameters):
    trace = synthetic_trace(model, 0.1, 0.03)
    assert (len(trace.tensors), trace.num_bytes) == (num_tensors, 4 * num_parameters)
    assert (trace.backward_s, trace.forward_s) == (pytest.approx(0.1), pytest.approx(0.03))
