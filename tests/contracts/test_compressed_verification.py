"""A run with a compressor ends where the same exchange in one thread does, or is told not to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from testbed.base.axes import COMPRESSORS
from testbed.base.config import RunConfig
from testbed.training import trainer
from testbed.training.compressed.spec import without_own_momentum
from testbed.training.protocol import StepReport
from testbed.training.session import Session
from testbed.training.summary import Outcome, judge
from tests.contracts.memory_cases import awkward
from tests.contracts.schedules import SMALL, setup_of
from tests.contracts.specs import DEFAULTS, Member, job_of
from tests.contracts.test_memory_matrix import plan_of
from tests.harness.rank_pool import PoolKeeper

CASE = "tests.contracts.compressed_cases:through_trainer"
STEPS = 5
# Each that is registered, with its defaults; wrappers around one with something to keep.
EVERY = tuple(
    f"{name}+topk:ratio=0.05" if COMPRESSORS.load(name).wraps else name
    for name in COMPRESSORS
    if name != COMPRESSORS.default
)
# One of each sort: sums of each dtype, gathered, two sums, rounds of deliveries, votes, levels.
SORTS = (
    *("fp16", "randomk:ratio=0.1", "powersgd:rank=2", "ef+topk:ratio=0.05", "dgc:ratio=0.05"),
    *("gtopk:ratio=0.05", "oktopk:ratio=0.05,every=2", "ef+sign", "onebit", "ef+qsgd:bits=2"),
)
SCHEDULES = ("wfbp", SMALL["bucket"], SMALL["p3"], SMALL["dear"])
REPACKED = "zmq-ps:repack=1"
MORE = (Member("zmq-ps:servers=dedicated:2"), Member(REPACKED))
BACKENDS = {
    member.text: member
    for member in (*DEFAULTS, *MORE)
    if member.follows_plans and not member.reason and member.device == "cpu"
}
# Of what is encoded again: selected elements, signs, levels that are drawn; by default, too.
BY_DEFAULT = ("onebit", "ef-sign")
AGAIN = ("ef+topk:ratio=0.05", "ef+sign", "ef+qsgd:bits=2", *BY_DEFAULT)


def model() -> nn.Module:
    return awkward(0, 0.0).model


def train(
    pools: PoolKeeper,
    backend: str,
    compressor: str,
    scheduler: str,
    num_ranks: int = 2,
    **more: Any,
) -> tuple[RunConfig, list[Outcome]]:
    member = BACKENDS[backend]
    plan = plan_of(scheduler, compressor, member.max_channels, model)
    setup = setup_of(plan, max(plan.num_channels, member.max_channels))
    if backend == REPACKED or compressor in BY_DEFAULT:
        # Servers keep what they have not sent as long as the backend is open.
        setup = replace(setup, num_channels=setup.num_channels + AGAIN.index(compressor))
    config = without_own_momentum(
        RunConfig(
            backend=backend,
            scheduler=scheduler,
            compressor=compressor,
            schedule="cosine",
            **{"steps": STEPS, "warmup": 1, "accumulate": 2, **more},
        )
    )
    ranks = pools.with_setup(job_of(member, num_ranks), setup)
    return config, ranks.run(CASE, plan, config, member.max_channels, setup=setup)


def check(pools: PoolKeeper, *choice: Any, **more: Any) -> None:
    config, outcomes = train(pools, *choice, **more)
    is_same, note = judge(config, outcomes, "bsp")
    assert is_same is True, (choice, note)
    assert f"with {config.compressor}" in note
    assert f"after {STEPS} steps" in note


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_compressor_is_verified(pools: PoolKeeper, num_ranks: int) -> None:
    for number, compressor in enumerate(EVERY):
        check(pools, "loopback", compressor, SCHEDULES[number % len(SCHEDULES)], num_ranks)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "loopback"])
def test_every_sort_is_verified_on_every_backend(pools: PoolKeeper, backend: str) -> None:
    for number, compressor in enumerate(AGAIN if backend == REPACKED else SORTS):
        check(pools, backend, compressor, SCHEDULES[number % len(SCHEDULES)])


class Forgetful(Session):
    """What was not sent is lost after each step."""

    def end_step(self, *, flush: bool = False) -> StepReport:
        report = super().end_step(flush=flush)
        assert self.engine is not None
        self.engine.driver.states.clear()
        return report


@pytest.mark.parametrize("compressor", ["ef+topk:ratio=0.05", "powersgd:rank=2"])
def test_other_work_is_told(
    pools: PoolKeeper, monkeypatch: pytest.MonkeyPatch, compressor: str
) -> None:
    monkeypatch.setattr(trainer, "Session", Forgetful)
    config, outcomes = train(pools, "loopback", compressor, "wfbp")
    is_same, note = judge(config, outcomes, "bsp")
    assert is_same is False
    assert note.startswith(f"differs from a single process with {compressor} by")


def test_a_mirror_of_what_was_not_sent_is_verified(pools: PoolKeeper) -> None:
    check(pools, "loopback", "ef:units=update+topk:ratio=0.05", "wfbp", memory="mirror")
