"""Activations that are moved or made again, under schedulers that update in the next forward pass.

On two ranks, by the trainer: steps of several micro-batches, momentum, a rate that changes, a tied
weight, running statistics, what no rank uses and what only one rank uses, and dropout where each
rank has a random generator of its own.
"""

from __future__ import annotations

import pytest
import torch
from msgspec import structs
from torch import nn

from testbed.base.config import RunConfig
from testbed.training.summary import Outcome
from tests.contracts.memory_cases import awkward
from tests.contracts.schedules import setup_of
from tests.contracts.specs import DEFAULTS, job_of
from tests.contracts.test_memory_matrix import SCHEDULES, plan_of
from tests.harness.rank_pool import PoolKeeper

CASE = "tests.contracts.memory_cases:through_trainer"
SPARSE = "ef:units=update+topk:ratio=0.05"
MEMBERS = {member.text: member for member in DEFAULTS}
STEPS = 4


def model() -> nn.Module:
    return awkward(0, 0.0).model


def crosses(scheduler: str) -> bool:
    """Whether it sends or updates in the next forward pass."""
    return plan_of(scheduler, "none", 3, model).crosses_iteration


CROSSING = tuple(filter(crosses, SCHEDULES))


@pytest.mark.parametrize("compressor", ["none", SPARSE])
@pytest.mark.parametrize("scheduler", CROSSING)
@pytest.mark.parametrize("backend", ["loopback", "gloo"])
def test_activations_change_nothing(
    pools: PoolKeeper, backend: str, scheduler: str, compressor: str
) -> None:
    member = MEMBERS[backend]
    plan = plan_of(scheduler, compressor, member.max_channels, model)
    assert plan.crosses_iteration
    setup = setup_of(plan, max(plan.num_channels, member.max_channels))
    ranks = pools.with_setup(job_of(member, 2), setup)
    config = RunConfig(
        scheduler=scheduler,
        compressor=compressor,
        schedule="cosine",
        precision="float64",
        accumulate=2,
        steps=STEPS,
        warmup=1,
        verify_steps=0,
    )
    dropout = 0.0 if member.facts.in_process else 0.3

    def train(memory: str) -> list[tuple[Outcome, dict[str, torch.Tensor]]]:
        given = structs.replace(config, memory=memory)
        return ranks.run(CASE, plan, given, dropout, setup=setup)

    theirs = train("none")
    for memory in ("checkpoint", "offload:min_kib=0", "laysa"):
        # laysa keeps a mirror, which adds a gradient to what was not sent before it multiplies.
        is_exact = memory != "laysa" or compressor == "none"
        tolerance = 0.0 if is_exact else 1e-12
        for (outcome, ours), (plain, expected) in zip(train(memory), theirs, strict=True):
            assert outcome.loss == pytest.approx(plain.loss, rel=tolerance, abs=0.0)
            torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance, msg=memory)
            if outcome.rank == 0:
                assert outcome.memory is not None
                assert outcome.memory.extra_s > 0 or outcome.memory.moved_bytes > 0
