"""What replaying costs beside what it replays; ratios, and never of another machine's times."""

from __future__ import annotations

import statistics
import time

import torch
from pytest_benchmark.fixture import BenchmarkFixture

from testbed.base.trace import Trace
from testbed.replay.values import Readings, Values
from testbed.workloads.load import load_workload
from testbed.workloads.workload import Workload
from tests.benchmarks.conftest import describe


def spent_s(workload: Workload, steps: int) -> list[float]:
    """Forward and backward of each step, nothing else in between but forgetting the gradients."""
    times = []
    assert workload.loss is not None
    assert workload.on_resume is not None
    batch = workload.train.batch(range(32))
    for _ in range(steps):
        workload.on_resume()
        start_s = time.perf_counter()
        torch.autograd.backward(workload.loss(workload.model, batch))
        times.append(time.perf_counter() - start_s)
        workload.model.zero_grad(set_to_none=True)
    return times


def test_replayed_compute_is_within_2_percent_of_the_trace(
    benchmark: BenchmarkFixture, one_core: None
) -> None:
    workload = load_workload("replay:resnet50-v100", seed=1)
    times_s = benchmark.pedantic(spent_s, (workload, 25))[5:]
    recorded_s = 0.0633 + 0.0648
    ratio = statistics.median(times_s) / recorded_s
    describe(benchmark, "replaying", replayed_over_recorded=ratio)
    assert 1.0 <= ratio <= 1.02


def test_gradients_cost_little_more_than_a_copy(benchmark: BenchmarkFixture) -> None:
    tensor, source = torch.empty(25_000_000), torch.ones(25_000_000)
    values = Values(seed=1)

    def timed(action: object) -> float:
        times = []
        for _ in range(7):
            start_s = time.perf_counter()
            action()  # type: ignore[operator]
            times.append(time.perf_counter() - start_s)
        return statistics.median(times)

    copy_s = timed(lambda: tensor.copy_(source))
    fill_s = benchmark.pedantic(timed, (lambda: values.fill(tensor, 5, 1.5),))
    describe(benchmark, "replaying", fill_over_copy=fill_s / copy_s)
    assert fill_s <= 1.5 * copy_s


def test_reading_parameters_takes_less_than_half_a_percent_of_a_step(
    benchmark: BenchmarkFixture,
) -> None:
    """Processor time of one thread beside the recorded time of the smallest shipped step."""
    workload = load_workload("replay:resnet50-v100", seed=1)
    parameters = list(workload.model.parameters())
    readings = Readings()
    for number, parameter in enumerate(parameters):
        readings.begin(number, parameter)

    def read_all() -> float:
        start_s = time.thread_time()
        for number, parameter in enumerate(parameters):
            readings.factor(number, readings.read(number, parameter))
        return time.thread_time() - start_s

    spent_s = statistics.median(benchmark.pedantic(lambda: [read_all() for _ in range(50)]))
    assert isinstance(workload.recorded, Trace)
    recorded_s = workload.recorded.forward_s + workload.recorded.backward_s
    describe(benchmark, "replaying", read_over_recorded=spent_s / recorded_s)
    assert spent_s <= 0.005 * recorded_s
