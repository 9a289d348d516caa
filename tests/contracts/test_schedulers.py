"""Every scheduler over every backend arrives where one process and the naive twin arrive."""

from __future__ import annotations

import functools

import pytest
import torch

from testbed.training.sampling import digest_tensors
from tests.contracts.schedules import (
    COMPLETE,
    LINKS,
    ON_SERVERS,
    SPECS,
    TRAININGS,
    Training,
    plan_of,
    setup_of,
)
from tests.contracts.session_models import Recipe, reference
from tests.contracts.specs import SCHEDULED, SERVING, jobs
from tests.harness.rank_pool import Job, PoolKeeper

CASES = "tests.contracts.schedule_cases"
TWIN = "tests.contracts.session_cases:by_naive_twin"
TOLERANCE = {"float32": 1e-5, "float64": 1e-12}


def two_or_four(num_ranks: int) -> bool:
    return num_ranks in (2, 4)


every_job = pytest.mark.parametrize("job", jobs(SCHEDULED + SERVING, two_or_four, quick=(2,)))


@every_job
@pytest.mark.parametrize("spec", SPECS)
def test_every_scheduler_trains_as_one_process(job: Job, spec: str, pools: PoolKeeper) -> None:
    serves = job.backend in [member.text for member in SERVING]
    for name, training in (ON_SERVERS if serves else TRAININGS).items():
        recipe, plan = training.recipe, plan_of(spec, training, job.num_ranks)
        setup = setup_of(plan, job.setup.num_channels)
        ranks = pools.with_setup(job, setup)
        if serves and plan.halves:
            words = ranks.run(f"{CASES}:refusal", recipe, plan, setup=setup)
            assert all(f"{plan.scheduler!r}" in w and "update=worker" in w for w in words), words
            continue
        trained = ranks.run(f"{CASES}:by_plan", recipe, plan, training.held_up, setup=setup)
        what = f"{name}: {plan.scheduler}"
        assert len({digest_tensors(rank.parameters) for rank in trained}) == 1, what
        for rank in trained[1:]:  # all did the same, in the same order
            assert rank.exchanges == trained[0].exchanges, what
        check(trained[0].parameters, expected(recipe, job.num_ranks), recipe, what)
        if recipe.twin:
            twins = ranks.run(TWIN, recipe, setup=setup)
            check(trained[0].parameters, twins[0], recipe, what)


@pytest.mark.parametrize("job", jobs(SERVING, two_or_four, quick=(2,)))
@pytest.mark.parametrize("spec", SPECS)
def test_a_server_refuses_unused_parameters(job: Job, spec: str, pools: PoolKeeper) -> None:
    recipe = Recipe("unused everywhere")
    plan = plan_of(spec, Training(recipe, "compute-bound"), job.num_ranks)
    setup = setup_of(plan, job.setup.num_channels)
    words = pools.with_setup(job, setup).run(f"{CASES}:refusal", recipe, plan, setup=setup)
    expected = f"scheduler {plan.scheduler!r}" if plan.halves else "'spare.weight' got no gradient"
    assert all(expected in w and "update=worker" in w for w in words), words


def test_the_links_lead_to_different_groups() -> None:
    """Else the trainings above would all run the same plan."""
    for spec in ("mg-wfbp", "asc-wfbp:channels=3", "optimal", "osf", "pace:segment_kib=8", "auto"):
        plans = [plan_of(spec, Training(COMPLETE, link), 2) for link in LINKS]
        assert len({plan.messages for plan in plans}) > 1, spec


@functools.cache
def expected(recipe: Recipe, num_ranks: int) -> list[torch.Tensor]:
    return reference(recipe, num_ranks, seed=0)


def check(
    actual: list[torch.Tensor], wanted: list[torch.Tensor], recipe: Recipe, what: str
) -> None:
    tolerance = TOLERANCE[recipe.dtype]
    assert len(actual) == len(wanted)
    for ours, theirs in zip(actual, wanted, strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}"
        )
