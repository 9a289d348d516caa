"""What the trainer costs over a plain PyTorch loop: ratios of steps taken in turn in one process.

    pytest tests/benchmarks/test_bench_trainer.py --benchmark-only

A round is a step of ours; `extra_info` has its ratio to the plain loop's step beside it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from testbed.backends.loopback import LOOPBACK
from testbed.backends.none import NONE
from testbed.backends.protocol import Group
from testbed.base.config import RunConfig
from testbed.base.parts import Part
from testbed.control.inproc import InprocHub
from testbed.training.replica import Replica, backward, make_replica, sample_order, update
from testbed.training.sampling import SampleCursor
from testbed.training.session import Session
from testbed.workloads.load import load_workload
from tests.benchmarks.conftest import describe
from tests.harness.benchmarking import SampledClock

ROUNDS = 40
WARMUP = 5
CONFIG = RunConfig(workload="resnet20", workers=1, batch_size=32)


def plain_step(replica: Replica, cursor: SampleCursor) -> Callable[[int], None]:
    """A training step as a user without the testbed writes it."""

    def step(number: int) -> None:
        batch = replica.workload.train.batch(cursor.indices(number))
        loss = torch.nn.functional.cross_entropy(replica.model(batch[0]), batch[1])
        loss.backward()
        replica.optimizer.step()
        replica.schedule.step()
        replica.optimizer.zero_grad()

    return step


def testbed_step(replica: Replica, cursor: SampleCursor, session: Session) -> Callable[[int], None]:
    """The same through the session, as the trainer does it."""

    def step(number: int) -> None:
        backward(replica, cursor.indices(number), 1, session.accumulating)
        session.synchronize()
        update(replica, None)

    return step


testbed_step.__test__ = False  # type: ignore[attr-defined]


def make() -> tuple[Replica, SampleCursor]:
    replica = make_replica(load_workload("resnet20", seed=1), CONFIG, ROUNDS)
    replica.model.train()
    return replica, SampleCursor(sample_order(CONFIG, replica.workload, 1), 0)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", [NONE, LOOPBACK], ids=lambda kind: kind.name)
def test_one_worker_costs_little_over_a_plain_loop(
    kind: Part, benchmark: BenchmarkFixture, clock: SampledClock, one_core: None
) -> None:
    group = Group(0, 1, InprocHub(1).member(0))
    backend = kind.build(group, kind.options())
    ours, our_cursor = make()
    session = Session(ours.model, ours.optimizer, backend, group.control)
    theirs, their_cursor = make()
    steps = {
        "testbed": testbed_step(ours, our_cursor, session),
        "plain": plain_step(theirs, their_cursor),
    }
    times_s: dict[str, list[float]] = {name: [] for name in steps}

    for number in range(ROUNDS):
        # Each goes first every other time.
        for name in ("testbed", "plain") if number % 2 else ("plain", "testbed"):
            began_s = time.perf_counter()
            steps[name](number)
            times_s[name].append(time.perf_counter() - began_s)
    pairs = zip(times_s["testbed"][WARMUP:], times_s["plain"][WARMUP:], strict=True)
    ratio = statistics.median(a / b for a, b in pairs)
    config = {"workload": CONFIG.workload, "batch_size": CONFIG.batch_size, "backend": kind.name}
    describe(benchmark, "trainer, one worker", ratio_to_plain_loop=ratio, configuration=config)
    clock.replay(benchmark, times_s["testbed"][WARMUP:])
    for a, b in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(a, b)
    session.close()
    backend.close()
    assert ratio <= 1.03
