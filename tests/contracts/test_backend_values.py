"""Every backend brings the right values, whatever the number of ranks, dtype and size."""

from __future__ import annotations

import pytest

from tests.contracts.cases import DTYPES, FLOATS
from tests.contracts.specs import MOVING, SILENT, jobs, many
from tests.harness.rank_pool import Job, RankPool

SUMS, OPS = "tests.contracts.sum_cases", "tests.contracts.verb_cases"
LARGE_ELEMENTS = 16 << 20  # 64 MiB of float32

every_job = pytest.mark.parametrize("job", jobs(MOVING))


@every_job
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_integers_are_exact(job: Job, pool: RankPool, dtype: str) -> None:
    pool.run(f"{SUMS}:exact_sums", dtype)


@every_job
@pytest.mark.parametrize("dtype", FLOATS)
def test_sums_of_floats_are_near_and_alike_on_all_ranks(
    job: Job, pool: RankPool, dtype: str
) -> None:
    assert len(set(pool.run(f"{SUMS}:float_sums", dtype))) == 1


@pytest.mark.parametrize("job", jobs(MOVING, quick=(2,)))
def test_a_large_sum(job: Job, pool: RankPool) -> None:
    pool.run(f"{SUMS}:one_large_sum", LARGE_ELEMENTS)


@every_job
@pytest.mark.parametrize(
    "case",
    ["repeated_in_place", "repeated_fresh", "repeated_under_one_name", "shapes", "parameters"],
)
def test_sums_go_on(job: Job, pool: RankPool, case: str) -> None:
    pool.run(f"{SUMS}:{case}")


@every_job
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_fold_then_spread_is_a_sum(job: Job, pool: RankPool, dtype: str) -> None:
    pool.run(f"{OPS}:fold_then_spread", dtype)


@every_job
def test_halves_of_several_sums_are_kept_apart(job: Job, pool: RankPool) -> None:
    pool.run(f"{OPS}:halves_under_way")


@every_job
def test_halves_bring_the_same_bits_to_all_ranks(job: Job, pool: RankPool) -> None:
    assert len(set(pool.run(f"{OPS}:halves_equal_a_sum"))) == 1


@every_job
@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
def test_gather_of_unequal_sizes(job: Job, pool: RankPool, dtype: str) -> None:
    pool.run(f"{OPS}:gathers", dtype)


@every_job
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_broadcast_from_every_root(job: Job, pool: RankPool, dtype: str) -> None:
    pool.run(f"{OPS}:broadcasts", dtype)


@pytest.mark.parametrize("job", jobs(MOVING, many))
def test_a_barrier_waits_for_all(job: Job, pool: RankPool) -> None:
    pool.run(f"{OPS}:barrier_waits_for_all")


@every_job
def test_a_wait_that_ran_out_can_be_repeated(job: Job, pool: RankPool) -> None:
    pool.run(f"{OPS}:wait_can_be_repeated")


@pytest.mark.parametrize("job", jobs(SILENT, quick=(2,)))
def test_what_moves_nothing_leaves_tensors_alone(job: Job, pool: RankPool) -> None:
    pool.run(f"{SUMS}:nothing_moves")
