"""How long planning and simulating takes for every scheduler that stays in the backward pass.

    pytest tests/benchmarks/test_bench_scheduling.py --benchmark-only

The bounds are those promised for one core: 400 tensors with all schedulers in a second, 4000 in
ten.
"""

import random

import pytest

from testbed.base.link import Link
from testbed.base.trace import Trace, TraceTensor
from testbed.prediction.timeline import timeline
from testbed.scheduling.protocol import make_plan

SPECS = (
    "sequential",
    "wfbp",
    "bucket",
    "cycle",
    "mg-wfbp",
    "asc-wfbp",
    "optimal",
    "osf",
)
LINK = Link(backend="x", num_workers=16, latency_s=2.36e-4, seconds_per_byte=4.06e-10)


def random_trace(count):
    chance = random.Random(count)
    tensors = tuple(
        TraceTensor(
            name=f"t{i}",
            num_elements=chance.choice([64, 256, 2048, 65536, 1 << 20]),
            forward_s=chance.random() * 2e-4,
            backward_s=chance.random() * 4e-4,
        )
        for i in range(count)
    )
    return Trace(name="random", device="cpu", batch_size=1, tensors=tensors)


def simulate_all(specs, trace):
    return [timeline(make_plan(spec, trace, LINK), trace, LINK).iteration_s for spec in specs]


@pytest.mark.parametrize(("count", "bound_s"), [(400, 1.0), (4000, 10.0)])
def test_all_schedulers(benchmark, count, bound_s):
    trace = random_trace(count)
    times = benchmark.pedantic(simulate_all, (SPECS, trace), rounds=3, warmup_rounds=1)
    assert times[SPECS.index("optimal")] <= min(times[:5])
    assert benchmark.stats.stats.median < bound_s


@pytest.mark.parametrize("count", [400, 4000])
def test_concurrent_search(benchmark, count):
    trace = random_trace(count)
    times = benchmark.pedantic(simulate_all, (["optimal:channels=2", "asc-wfbp"], trace), rounds=1)
    assert times[0] <= times[1]
