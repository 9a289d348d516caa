"""Training over every backend arrives where one process arrives, and where the naive twin does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from testbed.training.sampling import digest_tensors
from tests.contracts.session_models import DIFFERENT, RECIPES, Recipe, build, reference
from tests.contracts.specs import DEFAULTS, jobs, samples_of_each_sort
from tests.harness.rank_pool import Job, RankPool

CASES = "tests.contracts.session_cases"
TOLERANCE = {"float32": 1e-5, "float64": 1e-12}
QUICK = samples_of_each_sort()
REST = tuple(member for member in DEFAULTS if member not in QUICK)


def two_or_three(num_ranks: int) -> bool:
    return num_ranks in (2, 3)


every_job = pytest.mark.parametrize(
    "job", jobs(QUICK, two_or_three, quick=(2,)) + jobs(REST, two_or_three, quick=())
)


@every_job
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.variant}, {r.dtype}")
def test_session_trains_as_one_process(job: Job, pool: RankPool, recipe: Recipe) -> None:
    everybody = pool.run(f"{CASES}:by_session", recipe)
    assert len({digest_tensors(parameters) for parameters in everybody}) == 1
    expected = reference(recipe, job.num_ranks, seed=0)
    check(everybody[0], expected, recipe, job)
    if recipe.twin:
        twins = pool.run(f"{CASES}:by_naive_twin", recipe)
        check(twins[0], expected, recipe, job)
        check(everybody[0], twins[0], recipe, job)


def check(
    actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], recipe: Recipe, job: Job
) -> None:
    """Near, or equal in every bit where all arithmetic is exact."""
    exact = recipe.variant == "integers" and job.num_ranks == 2
    tolerance = 0.0 if exact else TOLERANCE[recipe.dtype]
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@every_job
def test_unused_parameters_keep_their_start(job: Job, pool: RankPool) -> None:
    """Weight decay must not touch what no rank used."""
    recipe = Recipe("unused everywhere")
    start = build(recipe, seed=0)
    names = [name for name, _ in start.named_parameters()]
    trained = dict(zip(names, pool.run(f"{CASES}:by_session", recipe)[0], strict=True))
    for name, parameter in start.named_parameters():
        assert torch.equal(trained[name], parameter) == name.startswith("spare"), name


@every_job
@pytest.mark.parametrize("what", DIFFERENT)
def test_different_models_are_refused_on_every_rank(job: Job, pool: RankPool, what: str) -> None:
    for words in pool.run(f"{CASES}:different_models", what):
        assert "rank 1" in words
        assert "rank 0" in words
    pool.run("tests.contracts.usage_cases:still_works")
