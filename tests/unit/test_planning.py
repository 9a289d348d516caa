"""What a run predicts of its own step."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch

from testbed.base.config import RunConfig
from testbed.base.link import Link
from testbed.base.trace import Trace, TraceTensor
from testbed.launch.plan_options import plan_for, stream_of, why_whole
from testbed.launch.planning import Planned, measures_link, predicted_step_s
from testbed.prediction.cross_iteration import predict
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
    now_s = 0.0

    def action(name: str, takes_s: float) -> Callable[[], None]:
        def act() -> None:
            nonlocal now_s
            done.append(name)
            now_s += takes_s

        return act

    overhead = measure_overhead(
        action("fetch", 1.0),
        action("compute", 50.0),
        action("update", 2.0),
        torch.device("cpu"),
        warmup=1,
        repeats=3,
        clock=lambda: now_s,
    )
    assert done == ["fetch", "compute", "update"] * 4
    assert (overhead.fetch_s, overhead.update_s) == (1.0, 2.0)


def test_a_link_is_measured_up_to_what_the_run_sends() -> None:
    sweep = quick(102_228_128, dilation=10.0)
    assert sweep.sizes[0] == 4096
    assert sweep.sizes[-3:] == (4 << 20, 16 << 20, 64 << 20)
    assert sweep.stream == ()
    assert sweep.budget_s == 10.0
    assert sweep.concurrent_bytes == 102_228_128 // 64 * 4
    assert quick().concurrent_bytes == 1 << 20
    assert quick(3).sizes == quick().sizes
    assert quick().sizes[-1] == 4 << 20


def test_compressed_messages_are_timed_in_a_row_of_shorter_ones() -> None:
    plan = make_plan("wfbp", TRACE, LINK)
    assert stream_of(plan) == [1_000_000] * 4
    assert stream_of(plan, 16) == [62_500] * 4
    assert stream_of(plan, 1_000_000) == [4] * 4


def test_small_messages_are_measured_in_a_row_and_large_ones_alone() -> None:
    sizes = (4, 1 << 20, 1 << 21, 1 << 22, 1 << 25)
    assert [Exchange(size).num_in_row for size in sizes] == [9, 9, 8, 4, 1]
    assert Exchange(1 << 20, 4).num_in_row == 4


@pytest.mark.parametrize(
    ("scheduler", "profiled"), [("bucket", False), ("bucket:timeout_ms=5", True)]
)
def test_a_timeout_needs_a_profile(scheduler: str, profiled: bool) -> None:
    assert measures_link(RunConfig(scheduler=scheduler)) is profiled


# More to send than backward hides, so that it pays to send during the next forward pass.
SLOW = msgspec.structs.replace(LINK, seconds_per_byte=1e-7)
WHOLE = [RunConfig(clip_norm=1.0), RunConfig(precision="fp16")]


@pytest.mark.parametrize("config", WHOLE)
@pytest.mark.parametrize(
    "scheduler", ["dear:mib=1", "p3:slice_elements=50000", "pace", "bytescheduler:credit_kib=1"]
)
def test_where_steps_wait_for_the_whole_gradient_nothing_crosses(
    config: RunConfig, scheduler: str
) -> None:
    plan = make_plan(scheduler, TRACE, SLOW)
    crossing_s = predicted_step_s(Planned(plan, trace=TRACE, link=SLOW))
    planned = Planned(plan, trace=TRACE, link=SLOW, whole=why_whole(config))
    whole_s = predicted_step_s(planned)
    last_s = max(span.end_s for span in predict(plan, TRACE, SLOW).spans)
    assert whole_s == max(last_s, TRACE.backward_s) + TRACE.forward_s
    assert crossing_s is not None
    assert whole_s > crossing_s


@pytest.mark.parametrize("config", WHOLE)
def test_auto_does_not_choose_for_an_overlap_that_cannot_be(config: RunConfig) -> None:
    free = plan_for(RunConfig(scheduler="auto"), TRACE, SLOW)
    assert free.crosses_iteration
    bound = plan_for(msgspec.structs.replace(config, scheduler="auto:noise=0.1"), TRACE, SLOW)
    assert not bound.crosses_iteration
    assert bound.scheduler == "auto:noise=0.1"
    assert "without overlap with the next forward pass" in bound.reason
    named = plan_for(msgspec.structs.replace(config, scheduler="dear"), TRACE, SLOW)
    assert named == make_plan("dear", TRACE, SLOW)
