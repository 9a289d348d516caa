"""Planners that know what a message costs the computing thread."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest

from testbed.base.link import Link
from testbed.base.trace import Trace
from testbed.prediction.cross_iteration import predict
from testbed.prediction.timeline import Backward
from testbed.scheduling.build import plan_of
from testbed.scheduling.processor_time import charged_stops
from testbed.scheduling.protocol import make_plan

PLANNERS = (
    *("mg-wfbp", "asc-wfbp", "asc-wfbp:channels=4", "osf", "osf:rule=message", "osf:rule=schedule"),
    *("optimal", "optimal:channels=2", "pace:segment_kib=0", "pace:segment_kib=0.02"),
)


def drawn(draw: random.Random) -> tuple[Trace, Link]:
    """A model and a link on which start-ups, transfers, compute and o are all of one magnitude."""
    count = draw.randrange(1, 9)
    times = [float(draw.randrange(1, 9)) for _ in range(count)]
    sizes = [draw.randrange(1, 12) for _ in range(count)]
    forward = [float(draw.randrange(1, 6)) for _ in range(count)]
    link = Link(
        backend="x",
        num_workers=2,
        latency_s=draw.choice([0.0, 0.5, 4.0]),
        seconds_per_byte=draw.choice([0.05, 0.25, 1.0]),
        submit_s=draw.choice([0.0, 0.5, 3.0]),
        landing_s=draw.choice([0.0, 0.5, 3.0]),
    )
    return Trace.from_backward(times, sizes, forward), link


def free(link: Link) -> Link:
    return msgspec.structs.replace(link, submit_s=0.0, landing_s=0.0)


@pytest.mark.parametrize("planner", PLANNERS)
def test_with_o_no_plan_is_slower_than_without_and_some_are_faster(planner: str) -> None:
    draw, faster = random.Random(planner), 0
    for _ in range(150):
        trace, link = drawn(draw)
        without, known = (make_plan(planner, trace, each) for each in (free(link), link))
        if not (link.submit_s or link.landing_s):
            assert known == without
        for launches in (False, True):
            before, now = (
                predict(plan, trace, link, launches=launches).iteration_s
                for plan in (without, known)
            )
            assert now <= before
            faster += now < before
    assert faster > 0


def test_one_worker_sends_nothing_and_plans_as_without() -> None:
    trace, link = drawn(random.Random(3))
    alone = msgspec.structs.replace(link, num_workers=1, submit_s=5.0)
    for planner in PLANNERS:
        assert make_plan(planner, trace, alone) == make_plan(planner, trace, free(alone))


def test_groups_are_the_best_of_all_where_taking_results_costs_nothing() -> None:
    draw = random.Random(7)
    for _ in range(200):
        trace, link = drawn(draw)
        link = msgspec.structs.replace(link, landing_s=0.0)
        count = len(trace.tensors)
        inner = range(1, count)
        best_s = min(
            predict(plan_of("x", trace, [*chosen, count]), trace, link).iteration_s
            for size in range(count)
            for chosen in itertools.combinations(inner, size)
        )
        stops = charged_stops(Backward.of(trace), link, count)
        assert predict(plan_of("x", trace, stops), trace, link).iteration_s == pytest.approx(best_s)
