"""Schedulers: what planning takes, and what a training step takes under the plan.

    pytest tests/benchmarks/test_bench_scheduling.py --benchmark-only

Bounds are in yardsticks, of which 30 are a second of a core: the planner must not be what a
user waits for.
"""

import pytest

from testbed.memory.strategy import KEEP_ALL
from testbed.prediction.cross_iteration import predict
from testbed.scheduling.break_even import plan_and_predict
from testbed.scheduling.protocol import make_plan
from tests.benchmarks.cells import NUM_RANKS, marks_of
from tests.benchmarks.conftest import describe
from tests.contracts.schedules import setup_of
from tests.harness.bench_cases import FOUR_BYTES
from tests.harness.benchmarking import least, processor_s, slowest, yardsticks
from tests.harness.planned import (
    ALL,
    BALANCED,
    LINKS,
    WIDTHS,
    log_normal,
    tiny,
    trace_named,
    trace_of_layers,
)

IN_BACKWARD = tuple(spec for spec in ALL if spec not in ("dear", "bytescheduler", "p3", "pace"))
CROSSING = ("pace:window=1", "bytescheduler", "p3", "dear")
ROUNDS = 30


def plans():
    return [
        pytest.param(spec, name, marks=[pytest.mark.smoke] * (name == "resnet50-v100"))
        for name in ("resnet50-v100", "400", "4000")
        for spec in ALL
        if (spec, name) != ("pace", "4000")  # a minute; its bound is below
    ]


@pytest.mark.parametrize(("spec", "trace_name"), plans())
def test_planning(benchmark, spec, trace_name):
    trace = trace_named(trace_name)
    describe(
        benchmark,
        f"planning, {len(trace.tensors)} tensors",
        num_bytes=sum(t.num_elements for t in trace.tensors) * FOUR_BYTES,
        configuration={"scheduler": spec, "trace": trace_name},
    )
    rounds = 10 if len(trace.tensors) < 1000 else 3
    plan = benchmark.pedantic(make_plan, (spec, trace, BALANCED), rounds=rounds, warmup_rounds=1)
    benchmark.extra_info["messages"] = len(plan.messages)


def executions():
    over = {"mpi-ring": ALL, "gloo": ("wfbp", "bucket:mib=1", "pace"), "zmq-ps": ("wfbp", "p3")}
    return [
        pytest.param(backend, spec, marks=marks_of(backend, smoke=spec in ("wfbp", "pace")))
        for backend, specs in over.items()
        for spec in specs
    ]


@pytest.mark.parametrize(("backend", "spec"), executions())
def test_executing(benchmark, clock, ranks, backend, spec):
    trace = trace_of_layers()
    plan = make_plan(spec, trace, BALANCED)
    case = ("tests.harness.bench_cases:time_steps", plan, WIDTHS, ROUNDS, KEEP_ALL)
    by_rank_s = ranks.run(backend, NUM_RANKS, setup_of(plan, 1), *case)
    describe(
        benchmark,
        f"executing over {backend}, {NUM_RANKS} ranks",
        num_bytes=sum(t.num_elements for t in trace.tensors) * FOUR_BYTES,
        ranks=NUM_RANKS,
        messages=len(plan.messages),
        cross_rank_min_s=least(by_rank_s),
        configuration={"backend": backend, "scheduler": spec, "widths": WIDTHS},
    )
    clock.replay(benchmark, slowest(by_rank_s))


def plan_and_simulate(specs, trace, link):
    return [predict(make_plan(spec, trace, link), trace, link).iteration_s for spec in specs]


@pytest.mark.parametrize(("num_tensors", "at_most"), [(400, 30), (4000, 300)])
def test_schedulers_in_backward_are_no_wait(benchmark, num_tensors, at_most):
    taken = (plan_and_simulate, IN_BACKWARD, log_normal(num_tensors), BALANCED)
    took_s, times_s = benchmark.pedantic(processor_s, taken, rounds=1)
    found = yardsticks(took_s)
    describe(benchmark, "bounds of planning", yardsticks=found, at_most=at_most)
    best_s = times_s[IN_BACKWARD.index("optimal")]
    merging = ("sequential", "wfbp", "bucket", "cycle", "mg-wfbp")
    assert best_s <= min(times_s[IN_BACKWARD.index(spec)] for spec in merging)
    assert found <= at_most


@pytest.mark.parametrize("num_tensors", [400, 4000])
def test_a_concurrent_search_is_no_worse_than_its_start(benchmark, num_tensors):
    specs, trace = ("optimal:channels=2", "asc-wfbp"), log_normal(num_tensors)
    describe(benchmark, "bounds of planning")
    times_s = benchmark.pedantic(plan_and_simulate, (specs, trace, BALANCED), rounds=1)
    assert times_s[0] <= times_s[1]


@pytest.mark.parametrize("link", ["10GbE", "InfiniBand"])
@pytest.mark.parametrize(
    ("num_tensors", "specs", "at_most"),
    [
        (400, CROSSING, 15),
        (400, ("pace",), 150),
        (4000, CROSSING, 150),
        (4000, ("pace",), 1800),
    ],
    ids=["400", "400-fused", "4000", "4000-fused"],
)
@pytest.mark.timeout(300)
def test_schedulers_that_cross_are_no_wait(benchmark, link, num_tensors, specs, at_most):
    taken = (plan_and_simulate, specs, log_normal(num_tensors), LINKS[link])
    took_s, _ = benchmark.pedantic(processor_s, taken, rounds=1)
    found = yardsticks(took_s)
    describe(benchmark, "bounds of planning", yardsticks=found, at_most=at_most)
    assert found <= at_most


@pytest.mark.timeout(300)
def test_many_tiny_tensors_are_no_wait(benchmark):
    taken = (plan_and_predict, "pace", tiny(4000), LINKS["10GbE"])
    took_s, _ = benchmark.pedantic(processor_s, taken, rounds=1)
    found = yardsticks(took_s)
    describe(benchmark, "bounds of planning", yardsticks=found)
    assert found <= 1800
