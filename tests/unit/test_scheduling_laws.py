"""Laws of the planners and of the timeline, against slow and obvious ways to compute the same.

Times and sizes are whole numbers, so that ties occur and are exact.
"""

import random
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.base.link import Piece, phases_s, times_s
from testbed.base.plan import plan_problem
from testbed.prediction.contention import first_in_first_out
from testbed.prediction.factors import scaling
from testbed.prediction.timeline import Backward, serial_end_s, timeline
from testbed.scheduling.asc_wfbp import asc_stops
from testbed.scheduling.build import add_then_close, plan_of, stops_of
from testbed.scheduling.mg_wfbp import merge_recomputing, merge_streaming
from testbed.scheduling.optimal import optimal_stops, optimal_stops_plain, search_concurrent
from testbed.scheduling.osf import global_stops
from testbed.scheduling.protocol import make_plan
from tests.harness.traces import (
    SLOWDOWN,
    all_stops,
    concurrent_ends,
    end_of_serial,
    exposed_by_backlog_s,
    make_link,
    make_trace,
)

SERIAL = (
    "sequential",
    "wfbp",
    "bucket:mib=1e-5,first_mib=3e-6",
    "bucket:mib=1e-5,timeout_ms=4000",
    "mg-wfbp",
    "asc-wfbp:channels=1",
    "optimal",
    "osf:rule=global",
    "osf:rule=message",
    "osf:rule=schedule",
    "osf:rule=exact",
)
CONCURRENT = ("asc-wfbp", "asc-wfbp:channels=3", "optimal:channels=2")
TICKED = ("cycle:ms=3000", "cycle:ms=2000,mib=1e-5,blocking=0")


few = settings(max_examples=40, deadline=None)


def traces(max_size=9, min_bytes=0, dtypes=None):
    """Traces of 1 .. max_size tensors."""
    tensor = st.tuples(st.integers(0, 9), st.integers(min_bytes, 15), st.integers(0, 5))
    kinds = st.sampled_from(dtypes) if dtypes else st.none()
    return st.lists(st.tuples(tensor, kinds), min_size=1, max_size=max_size).map(_trace)


def _trace(rows):
    backward_s, num_bytes, forward_s = zip(*(row[0] for row in rows), strict=True)
    dtypes = [row[1] for row in rows] if rows[0][1] else None
    return make_trace(backward_s, num_bytes, forward_s, dtypes)


links = st.builds(
    make_link, st.integers(0, 9), st.integers(0, 3), st.sampled_from([None, SLOWDOWN])
)


def end_s(spec, trace, link):
    line = timeline(make_plan(spec, trace, link), trace, link)
    return max(s.end_s for s in line.spans)


@few
@given(traces(), links)
def test_dynamic_program_is_exhaustive_search(trace, link):
    best = min(end_of_serial(trace, stops, link) for stops in all_stops(len(trace.tensors)))
    assert end_s("optimal", trace, link) == best


@few
@given(traces(max_size=10), links)
def test_no_serial_scheduler_beats_the_dynamic_program(trace, link):
    best = end_s("optimal", trace, link)
    for spec in (*SERIAL, *TICKED):
        assert end_s(spec, trace, link) >= best, spec


MIXED = ("float32", "float16", "uint8")


@few
@given(traces(max_size=7, dtypes=MIXED), links)
def test_dynamic_program_knows_that_a_message_has_one_dtype(trace, link):
    best = min(
        timeline(plan_of("x", trace, stops), trace, link).spans[-1].end_s
        for stops in all_stops(len(trace.tensors))
    )
    assert end_s("optimal", trace, link) == best


@few
@given(traces(max_size=20, dtypes=MIXED), links)
def test_fast_program_equals_its_plain_twin_on_several_dtypes(trace, link):
    backward = Backward.of(trace)
    assert optimal_stops(backward, link) == optimal_stops_plain(backward, link)


def test_alternating_dtypes_cost_a_start_up_each():
    trace = make_trace([1] * 4, [4] * 4, dtypes=["float32", "float16"] * 2)
    plan = make_plan("optimal", trace, make_link(5))
    others = [make_plan(spec, trace, make_link(5)) for spec in ("wfbp", "bucket", "sequential")]
    ends_s = [timeline(p, trace, make_link(5)).iteration_s for p in (plan, *others)]
    assert ends_s[0] == min(ends_s)


@few
@given(traces(max_size=30), links)
def test_fast_forms_equal_their_plain_twins(trace, link):
    backward = Backward.of(trace)
    assert merge_streaming(backward, link) == merge_recomputing(backward, link)
    assert optimal_stops(backward, link) == optimal_stops_plain(backward, link)


@few
@given(traces(max_size=12), links)
def test_asc_groups_are_those_of_a_ready_queue(trace, link):
    backward = Backward.of(trace)
    count = len(backward)
    stops, free_s = [], 0
    while not stops or stops[-1] < count:
        first = stops[-1] if stops else 0
        start_s = max(free_s, backward.ready_s[first])
        stop = first + 1
        while stop < count and backward.ready_s[stop] < start_s:
            stop += 1
        stops.append(stop)
        free_s = start_s + link.time_s(sum(backward.num_bytes[first:stop]))
    assert asc_stops(backward, link) == stops


@few
@given(traces(), links)
def test_global_buffer_is_the_best_of_its_candidates(trace, link):
    backward = Backward.of(trace)
    limits = {*backward.num_bytes, *backward.prefix_bytes}
    ends = [
        serial_end_s(backward, add_then_close(backward.num_bytes, limit), link) for limit in limits
    ]
    assert serial_end_s(backward, global_stops(backward, link), link) == min(ends)


@few
@given(traces(max_size=12), links, st.randoms(use_true_random=False))
def test_serial_timeline_is_the_recursion(trace, link, chance):
    count = len(trace.tensors)
    stops = [*sorted(i for i in range(1, count) if chance.random() < 0.5), count]
    plan = plan_of("toy", trace, stops)
    line = timeline(plan, trace, link)
    assert stops_of(plan) == stops
    assert line.spans[-1].end_s == end_of_serial(trace, stops, link)
    backward = Backward.of(trace)
    assert line.exposed_s == exposed_by_backlog_s(backward, stops, link)
    found = scaling(trace, stops, link)
    assert (found.iteration_s, found.exposed_s) == (line.iteration_s, line.exposed_s)
    assert found.scaling_factor <= found.best_scaling_factor <= 1


@few
@given(traces(max_size=12, dtypes=["uint8", "float16", "float32"]), links)
def test_every_plan_sends_every_byte_once_and_in_order(trace, link):
    for spec in (*SERIAL, *CONCURRENT, *TICKED):
        plan = make_plan(spec, trace, link)
        assert plan_problem(plan) is None, spec
        line = timeline(plan, trace, link)
        assert sum(s.num_bytes for s in line.spans) == trace.num_bytes
        for channel in range(plan.num_channels):
            spans = [s for s in line.spans if s.channel == channel]
            assert all(s.start_s >= s.ready_s for s in spans)
            assert all(a.end_s <= b.start_s for a, b in pairwise(spans))
        for span in line.spans:
            assert len({trace.tensors[i].dtype for i in span.tensors}) == 1


@few
@given(traces(), st.integers(0, 9))
def test_one_worker_communicates_for_nothing(trace, latency_s):
    link = make_link(latency_s, 1, num_workers=1)
    for spec in (*SERIAL, *CONCURRENT):
        line = timeline(make_plan(spec, trace, link), trace, link)
        assert line.exposed_s == 0, spec
        assert line.iteration_s == line.lower_bound_s == trace.forward_s + trace.backward_s


@few
@given(traces(min_bytes=1), links, st.sampled_from(SERIAL))
def test_bounds(trace, link, spec):
    plan = make_plan(spec, trace, link)
    line = timeline(plan, trace, link)
    a, b = link.latency_s, link.seconds_per_byte
    last_s = max(s.end_s for s in line.spans)
    assert last_s >= trace.backward_s + a + b * trace.tensors[0].num_bytes
    first_s = min(s.ready_s for s in line.spans)
    assert last_s >= first_s + len(plan.messages) * a + b * trace.num_bytes
    assert line.iteration_s >= line.lower_bound_s


@few
@given(traces(), links, st.sampled_from(SERIAL), st.integers(0, 8))
def test_the_end_never_falls_with_costs_or_sizes(trace, link, spec, grown):
    count = len(trace.tensors)
    stops = stops_of(make_plan(spec, trace, link))
    tensors = list(reversed(trace.tensors))
    sizes = [t.num_elements + (p == grown % count) for p, t in enumerate(tensors)]
    larger = make_trace([t.backward_s for t in tensors], sizes)
    slower = make_link(link.latency_s + 1, link.seconds_per_byte)
    thinner = make_link(link.latency_s, link.seconds_per_byte + 1)
    for other, path in ((larger, link), (trace, slower), (trace, thinner)):
        assert end_of_serial(other, stops, path) >= end_of_serial(trace, stops, link)
        assert end_s("optimal", other, path) >= end_s("optimal", trace, link)


@few
@given(traces(max_size=12, min_bytes=1), links)
def test_merging_rules_do_not_lose_to_their_baselines(trace, link):
    assert end_s("mg-wfbp", trace, link) <= end_s("wfbp", trace, link)
    assert end_s("mg-wfbp", trace, link) <= end_s("sequential", trace, link)
    assert end_s("asc-wfbp:channels=1", trace, link) <= end_s("wfbp", trace, link)


@few
@given(traces(min_bytes=1), st.integers(0, 3))
def test_extreme_start_ups(trace, seconds_per_byte):
    backward = Backward.of(trace)
    nothing = make_link(0, seconds_per_byte)
    assert end_s("wfbp", trace, nothing) == end_s("optimal", trace, nothing)
    gap_s = backward.ready_s[-1] - backward.ready_s[0]
    huge = make_link(gap_s, seconds_per_byte)
    assert end_s("sequential", trace, huge) == end_s("optimal", trace, huge)
    above = make_link(1 + max([0, *(t.backward_s for t in trace.tensors[:-1])]), seconds_per_byte)
    assert len(make_plan("mg-wfbp", trace, above).messages) == 1


@few
@given(traces(min_bytes=1), links)
def test_extreme_buckets(trace, link):
    alone = make_plan("bucket:mib=0,first_mib=0", trace, link)
    assert alone.messages == make_plan("wfbp", trace, link).messages
    large = make_plan("bucket:mib=1,first_mib=1", trace, link)
    assert large.messages == make_plan("sequential", trace, link).messages


queues = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), min_size=1, max_size=10)


def _queue(rows):
    ready_s = [sum(gap for gap, _ in rows[: i + 1]) for i in range(len(rows))]
    return ready_s, [size for _, size in rows]


def _ends(ready_s, sizes, link, num_channels):
    phases = [phases_s(link, size) for size in sizes]
    return first_in_first_out(ready_s, phases, num_channels, link.slowdown).end_s


@few
@given(queues, links, st.integers(1, 4))
def test_simultaneous_messages_event_by_event(rows, link, num_channels):
    ready_s, sizes = _queue(rows)
    exact = concurrent_ends(ready_s, sizes, link, num_channels)
    ends = _ends(ready_s, sizes, link, num_channels)
    assert ends == pytest.approx([float(e) for e in exact], abs=1e-9)


@few
@given(traces(max_size=12), links, st.integers(2, 4))
def test_plan_with_channels_is_simulated_as_it_was_planned(trace, link, num_channels):
    spec = f"asc-wfbp:channels={num_channels}"
    line = timeline(make_plan(spec, trace, link), trace, link)
    exact = concurrent_ends(
        [s.ready_s for s in line.spans], [s.num_bytes for s in line.spans], link, num_channels
    )
    assert [s.end_s for s in line.spans] == pytest.approx([float(e) for e in exact], abs=1e-9)


@few
@given(queues, links, st.integers(2, 4))
def test_concurrency_without_loss_never_ends_later(rows, link, num_channels):
    ready_s, sizes = _queue(rows)
    serial = max(_ends(ready_s, sizes, link, 1))
    assert max(_ends(ready_s, sizes, link, num_channels)) <= serial + 1e-9
    full = make_link(0, link.seconds_per_byte)
    serial = max(_ends(ready_s, sizes, full, 1))
    assert max(_ends(ready_s, sizes, full, num_channels)) == pytest.approx(serial, abs=1e-9)


@few
@given(st.integers(0, 9), st.integers(1, 9))
def test_two_equal_messages(latency_s, num_bytes):
    link = make_link(latency_s, 1, SLOWDOWN)
    together = _ends([0, 0], [num_bytes, num_bytes], link, 2)
    assert together == pytest.approx([latency_s + 1.5 * num_bytes] * 2, abs=1e-12)


def best_concurrent_s(backward, link, num_channels):
    return min(
        max(concurrent_ends(backward.group_ready_s(s), backward.group_sizes(s), link, num_channels))
        for s in all_stops(len(backward))
    )


@few
@given(traces(max_size=6), links, st.integers(2, 3))
def test_few_tensors_get_the_best_concurrent_groups(trace, link, num_channels):
    found = end_s(f"optimal:channels={num_channels}", trace, link)
    best = best_concurrent_s(Backward.of(trace), link, num_channels)
    assert found == pytest.approx(float(best), abs=1e-9)


@few
@given(traces(max_size=16), links, st.integers(2, 4))
def test_concurrent_search_never_loses_to_its_starts(trace, link, num_channels):
    found = end_s(f"optimal:channels={num_channels}", trace, link)
    assert found <= end_s(f"asc-wfbp:channels={num_channels}", trace, link) + 1e-9
    assert found <= end_s("optimal", trace, link) + 1e-9


def test_concurrent_search_is_near_the_best_groups():
    chance = random.Random(7)
    ratios = []
    for _ in range(60):
        rows = [(chance.randint(0, 9), chance.randint(1, 15)) for _ in range(7)]
        backward = Backward.of(make_trace(*zip(*rows, strict=True)))
        link = make_link(chance.randint(0, 9), 1, chance.choice([None, SLOWDOWN]))
        found_s, *_ = search_concurrent(backward, link, 2, optimal_stops(backward, link))
        ratios.append(found_s / best_concurrent_s(backward, link, 2))
    assert min(ratios) >= 1 - 1e-9
    assert max(ratios) < 1.05
    assert sum(r < 1 + 1e-9 for r in ratios) >= 45


@few
@given(st.lists(st.integers(0, 300), min_size=1, max_size=20))
def test_costs_of_many_sizes_are_those_of_each(sizes):
    link = make_link(4)
    pieces = (
        Piece(max_bytes=100, latency_s=1.1, seconds_per_byte=0.3),
        Piece(max_bytes=200, latency_s=2.7, seconds_per_byte=0.7),
        Piece(latency_s=0.1, seconds_per_byte=1.9),
    )
    piecewise = type(link)(
        backend="toy", num_workers=2, latency_s=1.0, seconds_per_byte=1.0, pieces=pieces
    )
    for path in (link, piecewise, make_link(1, 1, num_workers=1)):
        many = times_s(path, np.array(sizes, dtype=float)).tolist()
        assert many == [path.time_s(size) for size in sizes]
        assert [sum(phases_s(path, s)) for s in sizes] == many


def test_dynamic_program_is_exact_for_any_cost():
    trace = make_trace([2, 1, 1, 3, 1, 2], [40, 30, 90, 20, 70, 10])
    link = type(make_link(1))(
        backend="toy",
        num_workers=2,
        latency_s=1,
        seconds_per_byte=1,
        pieces=(
            Piece(max_bytes=64, latency_s=1, seconds_per_byte=0.125),
            Piece(latency_s=20, seconds_per_byte=0.0625),
        ),
    )
    backward = Backward.of(trace)
    best = min(serial_end_s(backward, stops, link) for stops in all_stops(6))
    assert serial_end_s(backward, optimal_stops(backward, link), link) == best
    assert best < serial_end_s(backward, [6], link)


def test_exact_arithmetic_of_the_comparison_itself():
    trace = make_trace([2, 2, 3, 3, 5], [3, 4, 1, 1, 1])
    assert end_of_serial(trace, [4, 5], make_link(4)) == Fraction(28)
    assert concurrent_ends([0, 3], [10, 4], make_link(4, 1, SLOWDOWN), 2) == [16, 13]
    assert len(all_stops(5)) == 16
