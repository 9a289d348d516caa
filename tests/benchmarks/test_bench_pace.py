"""Planning and simulating plans that cross the iteration, for models of many tensors.

    pytest tests/benchmarks/test_bench_pace.py --benchmark-only

Bounds are in seconds of one core: the planner must not be what a user waits for.
"""

import random
import time

import msgspec
import pytest

from testbed.base.link import Link
from testbed.base.trace import Trace, TraceTensor
from testbed.prediction.cross_iteration import predict
from testbed.scheduling.protocol import make_plan

WITHOUT_FUSION = ("pace:window=1", "bytescheduler", "p3", "dear")
LINKS = {
    "start-ups": Link(backend="x", num_workers=16, latency_s=9.08e-4, seconds_per_byte=7.4e-10),
    "balanced": Link(backend="x", num_workers=16, latency_s=2.36e-4, seconds_per_byte=4.06e-10),
}


def trace_of(num_tensors, num_elements=1e8, backward_s=0.2, forward_s=0.1):
    """Log-normal sizes and even times, as in large convolutional models."""
    draw = random.Random(1)
    sizes = [draw.lognormvariate(0, 2) for _ in range(num_tensors)]
    scale = num_elements / sum(sizes)
    tensors = tuple(
        TraceTensor(
            name=f"t{index}",
            num_elements=max(1, round(size * scale)),
            forward_s=forward_s / num_tensors,
            backward_s=2 * draw.random() * backward_s / num_tensors,
        )
        for index, size in enumerate(sizes)
    )
    return Trace(name="large", device="cpu", batch_size=1, tensors=tensors)


def plan_and_simulate(schedulers, trace, link):
    """Processor seconds, which other work on the machine hardly changes."""
    begun_s = time.process_time()
    for scheduler in schedulers:
        predict(make_plan(scheduler, trace, link), trace, link)
    return time.process_time() - begun_s


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
@pytest.mark.parametrize(
    ("num_tensors", "schedulers", "at_most_s"),
    [
        (400, WITHOUT_FUSION, 0.5),
        (400, ("pace",), 5),
        (4000, WITHOUT_FUSION, 5),
        (4000, ("pace",), 60),
    ],
    ids=["400", "400-fused", "4000", "4000-fused"],
)
@pytest.mark.timeout(300)
def test_planning_time(benchmark, link, num_tensors, schedulers, at_most_s):
    trace = trace_of(num_tensors)
    took_s = benchmark.pedantic(plan_and_simulate, (schedulers, trace, link), rounds=1)
    assert took_s <= at_most_s


@pytest.mark.timeout(300)
def test_planning_time_of_many_tiny_tensors(benchmark):
    """Start-ups alone decide: nearly all tensors wait at once, and bounds leave most in doubt."""
    tensor = TraceTensor(name="t", num_elements=64, forward_s=0.1 / 4000, backward_s=0.2 / 4000)
    tensors = tuple(msgspec.structs.replace(tensor, name=f"t{i}") for i in range(4000))
    trace = Trace(name="tiny", device="cpu", batch_size=1, tensors=tensors)
    link = Link(backend="x", num_workers=16, latency_s=1e-3, seconds_per_byte=7e-10)
    took_s = benchmark.pedantic(plan_and_simulate, (("pace",), trace, link), rounds=1)
    assert took_s <= 60
