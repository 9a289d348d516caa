"""The simulator: one plan of each scheduler, and a whole number of workers at scale.

pytest tests/benchmarks/test_bench_simulator.py --benchmark-only
"""

import pytest

from testbed.prediction.algorithms import Ring
from testbed.prediction.cross_iteration import predict
from testbed.prediction.extrapolate import extrapolate
from testbed.scheduling.break_even import plan_and_predict
from testbed.scheduling.protocol import make_plan
from tests.benchmarks.conftest import describe
from tests.harness.benchmarking import processor_s, yardsticks
from tests.harness.planned import ALL, BALANCED, LINKS, trace_named

NUM_WORKERS = 2048
WITHOUT_FUSION = tuple("pace:window=1" if spec == "pace" else spec for spec in ALL)


def plans():
    return [
        pytest.param(spec, name, marks=[pytest.mark.smoke] * (name == "resnet50-v100"))
        for name in ("resnet50-v100", "4000")
        for spec in WITHOUT_FUSION
    ]


@pytest.mark.parametrize(("spec", "trace_name"), plans())
def test_simulating(benchmark, spec, trace_name):
    trace = trace_named(trace_name)
    plan = make_plan(spec, trace, BALANCED)
    describe(
        benchmark,
        f"simulating, {len(trace.tensors)} tensors",
        messages=len(plan.messages),
        configuration={"scheduler": spec, "trace": trace_name},
    )
    found = benchmark.pedantic(predict, (plan, trace, BALANCED), rounds=5, warmup_rounds=1)
    assert found.iteration_s >= trace.forward_s + trace.backward_s


def one_count(specs, trace, link):
    at_scale = extrapolate(link, Ring(), NUM_WORKERS)
    return [plan_and_predict(spec, trace, at_scale)[1].iteration_s for spec in specs]


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
@pytest.mark.parametrize(("specs", "at_most"), [(WITHOUT_FUSION, 30), (ALL, 90)])
def test_twelve_schedulers_at_2048_workers(benchmark, link, specs, at_most):
    """About a second of a core without pace's fusion, three with it, at most."""
    taken = (one_count, specs, trace_named("resnet50-v100"), link)
    took_s, _ = benchmark.pedantic(processor_s, taken, rounds=3)
    found = yardsticks(took_s)
    describe(benchmark, "bounds of simulating", ranks=NUM_WORKERS, yardsticks=found)
    assert found <= at_most
