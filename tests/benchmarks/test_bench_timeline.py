"""What recording a timeline costs: steps with and without it, taken in turn in one process.

What is compared is the processor time of the one thread that trains: an event waits for nothing.
What an event costs does not depend on the batch, a step's noise does: of a workload with long steps
the cost is taken from steps of few samples, and held against a step of the usual batch.

Run with `pytest tests/benchmarks --benchmark-only`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from testbed.backends.none import NONE
from testbed.backends.protocol import Group
from testbed.base.config import RunConfig
from testbed.base.recorder import Recorder, event_cost_s
from testbed.control.inproc import InprocHub
from testbed.training.measurement import LayerEvents
from testbed.training.replica import backward, make_replica, sample_order, update
from testbed.training.sampling import SampleCursor
from testbed.training.session import Session
from testbed.workloads.load import load_workload

ROUNDS = 200
ROUNDS_OF_USUAL = 20
WARMUP = 5
USUAL_BATCH = 32
ALLOWED_SHARE = 0.01  # of a step, or so much an event, whichever is more
ALLOWED_S = 1e-6


def steps_of(workload: str, batch: int, recorder: Recorder | None) -> Callable[[int], float]:
    """A step as the trainer takes it, recorded or not; tells its processor time in seconds."""
    config = RunConfig(workload=workload, workers=1, batch_size=batch)
    replica = make_replica(load_workload(workload, seed=1), config, ROUNDS)
    replica.recorder = recorder
    layers = None if recorder is None else LayerEvents(recorder, replica.model)
    group = Group(0, 1, InprocHub(1).member(0))
    backend = NONE.build(group, NONE.options())
    session = Session(replica.model, replica.optimizer, backend, group.control, recorder=recorder)
    if layers is not None:
        layers.follow(replica.optimizer)
    cursor = SampleCursor(sample_order(config, replica.workload, 1), 0)

    def step(number: int) -> float:
        began_s = time.thread_time()
        backward(replica, cursor.indices(number), 1, session.accumulating)
        session.synchronize()
        update(replica, None)
        return time.thread_time() - began_s

    return step


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("workload", "batch"), [("digits-cnn", USUAL_BATCH), ("resnet20", 2)])
def test_recording_costs_a_hundredth_of_a_step_or_a_microsecond_an_event(
    workload: str, batch: int, benchmark: BenchmarkFixture
) -> None:
    torch.set_num_threads(1)
    recorder = Recorder(on=True)
    recorded, plain = steps_of(workload, batch, recorder), steps_of(workload, batch, None)
    usual = steps_of(workload, USUAL_BATCH, None)
    more_s: list[float] = []
    usual_s: list[float] = []

    def in_turn() -> None:
        for number in range(WARMUP + ROUNDS):
            pair = (recorded, plain) if number % 2 else (plain, recorded)
            times_s = {step: step(number % 30) for step in pair}
            if number >= WARMUP:
                more_s.append(times_s[recorded] - times_s[plain])
            if number % (ROUNDS // ROUNDS_OF_USUAL) == 0:
                usual_s.append(usual(number % 30))

    benchmark.pedantic(in_turn, rounds=1)
    num_events = len(recorder.events) / (WARMUP + ROUNDS)
    step_s = statistics.median(usual_s)
    cost_s = statistics.median(more_s)
    allowed_s = max(ALLOWED_SHARE * step_s, ALLOWED_S * num_events)
    benchmark.extra_info.update(
        events_a_step=num_events,
        cost_share=cost_s / step_s,
        cost_of_allowed=cost_s / allowed_s,
        event_of_allowed=event_cost_s() / ALLOWED_S,
    )
    assert event_cost_s() / ALLOWED_S < 1
    assert cost_s / allowed_s < 1
