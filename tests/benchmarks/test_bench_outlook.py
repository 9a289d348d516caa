"""How long one number of workers takes: twelve schedulers on ResNet-50's 161 tensors.

    pytest tests/benchmarks/test_bench_outlook.py --benchmark-only

Bounds are in seconds of one core: under 1 without pace's fusion, under 3 with it.
"""

import time

import pytest

from testbed.base.files import load_shipped_trace
from testbed.base.link import Link
from testbed.commands.simulate import scheduler_specs
from testbed.prediction.algorithms import Ring
from testbed.prediction.extrapolate import extrapolate
from testbed.scheduling.break_even import plan_and_predict

NUM_WORKERS = 2048
LINKS = {
    "10GbE": Link(backend="x", num_workers=16, latency_s=9.08e-4, seconds_per_byte=7.40e-10),
    "InfiniBand": Link(backend="x", num_workers=16, latency_s=2.36e-4, seconds_per_byte=4.06e-10),
    "low latency": Link(backend="x", num_workers=16, latency_s=1e-6, seconds_per_byte=4.06e-10),
}
ALL = scheduler_specs("all")
WITHOUT_FUSION = tuple("pace:window=1" if spec == "pace" else spec for spec in ALL)


def one_count(specs, trace, link):
    """Processor seconds, which other work on the machine hardly changes."""
    begun_s = time.process_time()
    at_scale = extrapolate(link, Ring(), NUM_WORKERS)
    for spec in specs:
        plan_and_predict(spec, trace, at_scale)
    return time.process_time() - begun_s


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
@pytest.mark.parametrize(("specs", "bound_s"), [(WITHOUT_FUSION, 1.0), (ALL, 3.0)])
def test_twelve_schedulers_at_2048_workers(benchmark, link, specs, bound_s):
    trace = load_shipped_trace("resnet50-v100")
    took_s = benchmark.pedantic(one_count, (specs, trace, link), rounds=3)
    assert took_s < bound_s
