"""What a run predicts of its own step."""

from __future__ import annotations

import time

import pytest
import torch

from testbed.launch.planning import Planned, predicted_step_s
from testbed.prediction.crossing import predict
from testbed.prediction.link import Link
from testbed.prediction.trace import Trace, TraceTensor
from testbed.profiling.overhead import Overhead, measure_overhead
from testbed.profiling.sweep import Exchange, quick
from testbed.scheduling.protocol import make_plan

TRACE = Trace(
    name="toy",
    device="V100",
    batch_size=4,
    tensors=tuple(
        TraceTensor(name=f"l{i}.weight", num_elements=250_000, forward_s=0.01, backward_s=0.02)
        for i in range(4)
    ),
)
LINK = Link(backend="x", num_workers=4, latency_s=1e-3, seconds_per_byte=2e-8)


@pytest.mark.parametrize("scheduler", ["sequential", "wfbp", "dear", "pace"])
def test_a_step_is_micro_batches_then_an_iteration_then_what_is_beside(scheduler: str) -> None:
    plan = make_plan(scheduler, TRACE, LINK)
    alone_s = predict(plan, TRACE, LINK).iteration_s
    assert predicted_step_s(Planned(plan, trace=TRACE, link=LINK)) == alone_s
    planned = Planned(
        plan,
        trace=TRACE,
        link=LINK,
        overhead=Overhead(fetch_s=0.001, update_s=0.005),
        micro_batches=3,
        dilation=10.0,
    )
    expected_s = 10 * (alone_s + 2 * (0.04 + 0.08) + 3 * 0.001 + 0.005)
    assert predicted_step_s(planned) == pytest.approx(expected_s, rel=1e-12)


def test_nothing_is_predicted_without_a_profile() -> None:
    assert predicted_step_s(Planned(make_plan("wfbp", TRACE, LINK))) is None


def test_overhead_counts_fetching_and_updating_and_not_what_is_in_between() -> None:
    done: list[str] = []

    def update() -> None:
        done.append("update")
        time.sleep(2e-3)

    def compute() -> None:
        done.append("compute")
        time.sleep(50e-3)

    overhead = measure_overhead(
        lambda: done.append("fetch"), compute, update, torch.device("cpu"), warmup=1, repeats=3
    )
    assert done == ["fetch", "compute", "update"] * 4
    assert overhead.update_s >= 2e-3
    assert overhead.fetch_s < overhead.update_s < 50e-3


def test_a_link_is_measured_up_to_what_the_run_sends() -> None:
    sweep = quick(102_228_128, dilation=10.0)
    assert sweep.sizes[0] == 4096
    assert sweep.sizes[-1] == 102_228_128
    assert sweep.budget_s == 10.0
    assert sweep.concurrent_bytes == 102_228_128 // 64 * 4
    assert quick().concurrent_bytes == 1 << 20
    assert quick(3).sizes == quick().sizes
    assert quick().sizes[-1] == 4 << 20


def test_small_messages_are_measured_in_a_row_and_large_ones_alone() -> None:
    assert [Exchange(size).num_in_row for size in (4, 1 << 17, 1 << 18, 1 << 20, 1 << 25)] == [
        8,
        8,
        4,
        1,
        1,
    ]
    assert Exchange(4096, 3).num_in_row == 1
