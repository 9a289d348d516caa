"""PACE's order and fusion against enumeration, and its plan against its oracle."""

from functools import cache
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.base.errors import UsageError
from testbed.base.plan import plan_problem
from testbed.prediction.cross_iteration import predict
from testbed.prediction.timeline import serial_s
from testbed.scheduling.pace import PaceOptions, fuse, fuse_plainly, jobs_of, plan_pace, released
from testbed.scheduling.pace_oracle import Job, Tensors, finish_s
from testbed.scheduling.protocol import make_plan
from tests.unit.crossing_cases import LINK_A, TRACE_A, link_of, links, trace_of, traces

TENSORS_A = released(TRACE_A, LINK_A, None)


def value(stops, ideal=True, tensors=TENSORS_A):
    return finish_s(jobs_of(tensors, stops), tensors.compute_s, ideal)


@pytest.mark.parametrize(
    ("stops", "finish"),
    [
        ([1, 2, 3, 4, 5], 33),
        ([4, 5], 33),
        ([5], 36),
        ([2, 5], 29),
        ([1, 3, 5], 28),
    ],
)
def test_oracle_of_the_worked_example(stops, finish):
    assert value(stops) == finish


def test_without_ideal_preemption_the_running_tensor_ends_first():
    assert value([1, 2, 3, 4, 5], ideal=False) == 34


def test_fusion_of_the_worked_example():
    fusion = fuse(TENSORS_A, 5, ideal=True)
    assert fusion.values_s == [33, 32, 29, 28, 28]
    assert value(fusion.stops) == 28


def test_a_segment_costs_a_start_up():
    tensors = Tensors([0], [0], [7], ["uint8"], link_of(1, 1), 3, 0)
    assert tensors.job(0, 1).total_s == 10


@st.composite
def jobs(draw, max_jobs=8):
    count = draw(st.integers(1, max_jobs))
    releases = sorted(draw(st.lists(st.integers(0, 10), min_size=count, max_size=count)))
    return [
        Job(release, draw(st.integers(0, 12)), 0, 0, draw(st.integers(1, 3)))
        for release in releases
    ]


def best_in_unit_slots(jobs):
    """The smallest max(C + q) over all ways to give each slot of time to one job."""

    @cache
    def best(now, left):
        ready = [i for i, job in enumerate(jobs) if left[i] and job.release_s <= now]
        if not ready:
            coming = [job.release_s for i, job in enumerate(jobs) if left[i]]
            return best(min(coming), left) if coming else 0
        found = []
        for i in ready:
            rest = tuple(n - (k == i) for k, n in enumerate(left))
            ended = 0 if rest[i] else now + 1 + jobs[i].tail_s
            found.append(max(ended, best(now + 1, rest)))
        return min(found)

    return best(0, tuple(int(job.total_s) for job in jobs))


@settings(max_examples=60, deadline=None)
@given(jobs())
def test_largest_tail_first_equals_enumeration(jobs):
    assert finish_s(jobs, 0, ideal=True) == best_in_unit_slots(jobs)


@given(jobs())
def test_free_preemption_never_loses(jobs):
    preemptive_s = finish_s(jobs, 0, ideal=True)
    assert preemptive_s <= finish_s(jobs, 0, ideal=False)
    free_s, worst_s = 0, 0
    for job in jobs:
        free_s = max(free_s, job.release_s) + job.total_s
        worst_s = max(worst_s, free_s + job.tail_s)
    assert preemptive_s <= worst_s


@given(jobs())
def test_the_lemma_equals_a_forward_pass_played_out(jobs):
    """Finish = max(compute, C + q): layers run one by one as their tensors end."""
    tails = sorted({job.tail_s for job in jobs}, reverse=True)
    backward_s = max(job.release_s for job in jobs)
    clock = backward_s
    for tail, following in zip(tails, [*tails[1:], 0], strict=True):
        urgent = [j for j in jobs if j.tail_s >= tail]
        free_s = 0
        for job in urgent:
            free_s = max(free_s, job.release_s) + job.total_s
        clock = max(clock, free_s) + tail - following
    assert finish_s(jobs, backward_s + tails[0], ideal=True) == clock


def all_stops(count):
    inner = range(1, count)
    return [[*cut, count] for k in range(count) for cut in combinations(inner, k)]


@settings(max_examples=80, deadline=None)
@given(traces(max_tensors=6), links)
def test_fusion_on_chains_equals_all_groupings(trace, link):
    tensors = released(trace, link, None)
    count = len(tensors)
    best = min(value(stops, tensors=tensors) for stops in all_stops(count))
    fusion = fuse(tensors, count, ideal=True)
    assert fusion.values_s[-1] == value(fusion.stops, tensors=tensors) == best


@st.composite
def any_tensors(draw):
    count = draw(st.integers(1, 9))

    def numbers(least, most):
        return draw(st.lists(st.integers(least, most), min_size=count, max_size=count))

    releases = sorted(numbers(0, 25))
    tails = numbers(0, 20)
    return Tensors(
        release_s=releases,
        tail_s=tails,
        num_bytes=numbers(0, 10),
        dtypes=[draw(st.sampled_from(["a", "a", "a", "b"])) for _ in range(count)],
        link=draw(links),
        segment_bytes=draw(st.sampled_from([None, 2, 5, 12])),
        compute_s=max(releases) + max(tails),
    )


@settings(max_examples=200, deadline=None)
@given(any_tensors(), st.integers(1, 9), st.booleans())
def test_fast_fusion_equals_the_plain_one(tensors, window, ideal):
    fast, plain = fuse(tensors, window, ideal), fuse_plainly(tensors, window, ideal)
    assert fast.values_s == plain.values_s
    assert value(fast.stops, ideal, tensors) == value(plain.stops, ideal, tensors)


def test_fast_fusion_equals_the_plain_one_over_many_blocks_of_rows():
    count = 150
    releases = [3 * i for i in range(count)]
    sizes = [(7 * i) % 11 for i in range(count)]
    tails = [(5 * i) % count for i in range(count)]
    for tail_s in (list(range(count)), tails):
        tensors = Tensors(releases, tail_s, sizes, ["a"] * count, link_of(2, 1), 6, 600)
        for ideal in (True, False):
            fast, plain = fuse(tensors, 4, ideal), fuse_plainly(tensors, 4, ideal)
            assert fast.values_s == plain.values_s


@given(any_tensors(), st.integers(1, 9), st.booleans())
def test_fusion_is_never_above_unfused(tensors, window, ideal):
    fusion = fuse(tensors, window, ideal)
    unfused = value(list(range(1, len(tensors) + 1)), ideal, tensors)
    assert fusion.values_s[-1] <= unfused
    assert value(fusion.stops, ideal, tensors) == fusion.values_s[-1]


@given(traces(max_bytes=40), links, st.sampled_from([0, 8 / 1024, 16 / 1024]), st.integers(1, 4))
def test_the_plan_takes_what_its_oracle_says(trace, link, segment_kib, window):
    options = PaceOptions(segment_kib=segment_kib, window=window)
    plan = plan_pace(trace, link, options)
    assert plan_problem(plan) is None
    tensors = released(trace, link, options.segment_bytes)
    expected = fuse(tensors, window, ideal=False).values_s[-1]
    assert predict(plan, trace, link).iteration_s == expected


def test_a_large_tensor_is_overtaken_at_a_segment_boundary():
    trace = trace_of([1, 9], [40, 8], [1, 1])
    plan = make_plan("pace:segment_kib=0.0078125,window=1", trace, link_of(0, 1))
    spans = predict(plan, trace, link_of(0, 1)).spans
    urgent = next(s for s in spans if s.tensors == (0,))
    assert (urgent.ready_s, urgent.start_s) == (10, 17)
    assert sum(s.start_s >= urgent.end_s for s in spans) == 3


def test_fifo_of_the_worked_example_is_beaten():
    fifo = serial_s(TENSORS_A.release_s, TENSORS_A.num_bytes, LINK_A)
    finish = max(end + tail for (_, end), tail in zip(fifo, TENSORS_A.tail_s, strict=True))
    assert finish == 39 > value([1, 2, 3, 4, 5])


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("pace:window=0", "window is 0"),
        ("pace:segment_kib=-1", "segment_kib is -1"),
        ("pace:credit_kib=nan", "credit_kib is nan"),
        ("pace:oracle=magic", "expected one of segmented, ideal"),
        ("pace:segmnt=3", "known options"),
        ("bytescheduler:credit_kib=0", "credit_kib is 0"),
        ("bytescheduler:partition_kib=inf", "partition_kib is inf"),
        ("p3:slice_elements=0", "slice_elements is 0"),
        ("dear:mib=-2", "mib is -2"),
        ("auto:noise=3", "noise is 3"),
    ],
)
def test_bad_options_are_named(spec, words):
    with pytest.raises(UsageError, match=words):
        make_plan(spec, TRACE_A, LINK_A)
