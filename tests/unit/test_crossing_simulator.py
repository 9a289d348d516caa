"""The simulator of plans that reach into the next forward pass, against one written naively."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.base.errors import UsageError
from testbed.prediction.cross_iteration import predict
from testbed.prediction.timeline import message_bytes
from testbed.scheduling.build import sliced_plan
from testbed.scheduling.protocol import make_plan
from tests.unit.crossing_cases import (
    LINK_A,
    LINK_B,
    TRACE_A,
    TRACE_B,
    ends,
    grouped_plan,
    link_of,
    links,
    trace_of,
    traces,
)


@pytest.mark.parametrize(
    ("partition", "credit", "ended", "finish_s"),
    [
        (8, 8, [14, 17, 11], 21),
        (4, 4, [10, 13, 18], 20),
        (2, 2, [11, 8, 20], 22),
        (2, 4, [14, 11, 20], 22),
        (1, 1, [10, 12, 26], 28),
    ],
)
def test_partitions_under_a_credit(partition, credit, ended, finish_s):
    plan = sliced_plan("x", TRACE_B, [partition] * 3, credit_bytes=credit, reason="")
    predicted = predict(plan, TRACE_B, LINK_B)
    assert ends(predicted, 3) == ended
    assert predicted.iteration_s == finish_s
    assert predicted.exposed_s is None


@pytest.mark.parametrize(
    ("trace", "link", "order", "ended", "finish_s"),
    [
        (TRACE_B, LINK_B, "fifo", [17, 14, 11], 23),
        (TRACE_A, LINK_A, "fifo", [32, 27, 22, 17, 9], 39),
        (TRACE_A, LINK_A, "priority", [24, 19, 14, 32, 9], 34),
    ],
)
def test_whole_tensors(trace, link, order, ended, finish_s):
    groups = [[i] for i in reversed(range(len(trace.tensors)))]
    predicted = predict(grouped_plan(trace, groups, order=order), trace, link)
    assert ends(predicted, len(trace.tensors)) == ended
    assert predicted.iteration_s == finish_s


def test_halves_spans():
    plan = grouped_plan(TRACE_A, [[4], [3, 2], [1, 0]], halves=True)
    predicted = predict(plan, TRACE_A, LINK_A)
    spans = [(s.start_s, s.end_s) for s in predicted.spans]
    folds, spreads = [(2, 5.5), (7, 11.5), (15, 18)], [(18, 21), (21, 25.5), (25.5, 29)]
    assert spans == folds + spreads
    assert [s.tensors for s in predicted.spans[3:]] == [(1, 0), (3, 2), (4,)]
    assert sum(s.num_bytes for s in predicted.spans) == TRACE_A.num_bytes


@pytest.mark.parametrize(
    ("groups", "finish_s"),
    [
        ([[4], [3, 2], [1, 0]], 30),
        ([[4, 3], [2, 1, 0]], 29.5),
        ([[4], [3], [2], [1], [0]], 33.5),
        ([[4, 3, 2, 1, 0]], 36),
    ],
)
def test_halves_iteration(groups, finish_s):
    plan = grouped_plan(TRACE_A, groups, halves=True)
    assert predict(plan, TRACE_A, LINK_A).iteration_s == finish_s


def test_spreads_run_back_to_back_while_forward_is_slow():
    trace = trace_of([1, 1, 1], [2, 2, 2], [9, 9, 9])
    plan = grouped_plan(trace, [[2], [1], [0]], halves=True)
    predicted = predict(plan, trace, link_of(2, 1))
    assert [(s.start_s, s.end_s) for s in predicted.spans[3:]] == [(7, 9), (9, 11), (11, 13)]
    assert predicted.iteration_s == 9 + 27


@given(traces(), links)
def test_one_group_in_halves_is_the_full_merge(trace, link):
    plan = grouped_plan(trace, [list(range(len(trace.tensors)))], halves=True)
    whole = predict(make_plan("sequential", trace, link), trace, link)
    assert predict(plan, trace, link).iteration_s == pytest.approx(whole.iteration_s)


@given(traces(), links, st.data())
def test_halves_overlap_at_most_all_of_backward_and_forward(trace, link, data):
    groups = _groups(data, len(trace.tensors))
    predicted = predict(grouped_plan(trace, groups, halves=True), trace, link)
    folds, spreads = predicted.spans[: len(groups)], predicted.spans[len(groups) :]
    fold_s, spread_s = (sum(s.end_s - s.start_s for s in half) for half in (folds, spreads))
    assert fold_s == spread_s
    bound_s = max(trace.backward_s, fold_s) + max(trace.forward_s, spread_s)
    assert predicted.iteration_s >= bound_s


def _groups(data, count):
    cuts = sorted(data.draw(st.sets(st.integers(1, count - 1)))) if count > 1 else []
    bounds = [0, *cuts, count]
    forward = [list(range(a, b)) for a, b in itertools.pairwise(bounds)]
    return forward[::-1]


@settings(max_examples=150)
@given(traces(), links, st.integers(1, 4), st.one_of(st.none(), st.integers(1, 9)))
def test_every_iteration_takes_the_predicted_time(trace, link, slice_elements, credit):
    limits = [slice_elements] * len(trace.tensors)
    plan = sliced_plan("x", trace, limits, credit_bytes=credit, reason="")
    iteration_s = predict(plan, trace, link).iteration_s
    assert _iterations(plan, trace, link, 3) == [iteration_s] * 3


def _iterations(plan, trace, link, count):
    """Times of iterations in a row on one channel, which is not told where one ends."""
    lengths, clock, free = [], 0, 0
    for _ in range(count):
        begun = clock
        waiting = [
            (m.priority, i, begun + max(trace.ready_s()[p.tensor] for p in m.parts), m)
            for i, m in enumerate(plan.messages)
        ]
        arrived = [0] * len(trace.tensors)
        under_way, now = [], begun
        while waiting:
            under_way = [(end, size) for end, size in under_way if end > now]
            ready = sorted(w for w in waiting if w[2] <= now)
            busy = sum(size for _, size in under_way)
            allowed = not under_way if plan.credit_bytes is None else busy < plan.credit_bytes
            if ready and allowed:
                waiting.remove(ready[0])
                message = ready[0][3]
                size = message_bytes(plan, message)
                free = max(free, now) + link.time_s(size)
                under_way.append((free, size))
                for part in message.parts:
                    arrived[part.tensor] = max(arrived[part.tensor], free)
                continue
            later = [w[2] for w in waiting if w[2] > now]
            now = min(later + [end for end, _ in under_way])
        clock = begun + trace.backward_s
        for index, tensor in enumerate(trace.tensors):
            clock = max(clock, arrived[index]) + tensor.forward_s
        lengths.append(clock - begun)
    return lengths


@given(traces(), links, st.integers(1, 4), st.one_of(st.none(), st.integers(1, 9)))
def test_spans_are_disjoint_after_their_readiness_and_cover_every_byte(trace, link, cut, credit):
    plan = sliced_plan("x", trace, [cut] * len(trace.tensors), credit_bytes=credit, reason="")
    predicted = predict(plan, trace, link)
    assert all(s.start_s >= s.ready_s for s in predicted.spans)
    in_order = sorted(predicted.spans, key=lambda s: (s.start_s, s.end_s))
    assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(in_order))
    assert sum(s.num_bytes for s in predicted.spans) == trace.num_bytes
    assert predicted.iteration_s >= predicted.lower_bound_s


@pytest.mark.parametrize("scheduler", ["bytescheduler", "p3", "dear", "pace"])
def test_one_worker_only_computes(scheduler):
    link = link_of(4, 1)
    alone = type(link)(backend="x", num_workers=1, latency_s=4, seconds_per_byte=1)
    plan = make_plan(scheduler, TRACE_A, alone)
    assert predict(plan, TRACE_A, alone).iteration_s == 22


def test_priority_within_backward_is_exposed():
    trace = trace_of([1, 1], [4, 1], [3, 3])
    plan = grouped_plan(trace, [[1], [0]], order="priority")
    within = type(plan)(
        **{f: getattr(plan, f) for f in plan.__struct_fields__} | {"crosses_iteration": False}
    )
    predicted = predict(within, trace, link_of(1, 1))
    assert (predicted.exposed_s, predicted.iteration_s) == (6, 14)


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"num_channels": 2}, "expected one channel"),
        ({"halves": True, "order": "priority"}, "expected order 'fifo'"),
    ],
)
def test_rules_that_cannot_be_simulated_together(rules, words):
    with pytest.raises(UsageError, match=words):
        predict(grouped_plan(TRACE_B, [[2], [1], [0]], **rules), TRACE_B, LINK_B)
