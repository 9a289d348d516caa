"""Wrong use is refused by name and does no harm; a closed backend stays closed."""

from __future__ import annotations

import pytest

from tests.contracts.specs import MEMBERS, MOVING, WITHOUT_SERVERS, jobs
from tests.harness.rank_pool import Job, RankPool

CASES = "tests.contracts.usage_cases"


@pytest.mark.parametrize("job", jobs(MEMBERS, quick=(1, 2)))
def test_wrong_use_is_refused(job: Job, pool: RankPool) -> None:
    assert pool.run(f"{CASES}:wrong_use") == [[]] * job.num_ranks


@pytest.mark.parametrize("job", jobs(MOVING, quick=(1, 2)))
def test_a_refusal_does_no_harm(job: Job, pool: RankPool) -> None:
    pool.run(f"{CASES}:wrong_use")
    pool.run(f"{CASES}:still_works")


@pytest.mark.ends_job(1)
@pytest.mark.parametrize("job", jobs(MOVING))
def test_closing_twice_and_submitting_after(job: Job, pool: RankPool) -> None:
    shared = pool.num_servers > 0  # dedicated servers serve one backend and end with it
    answers = pool.run(f"{CASES}:closing", job.backend, shared)
    assert answers == [["UsageError"]] * job.num_ranks
    if shared:
        assert_ends_in_order(pool)


@pytest.mark.ends_job(3)
@pytest.mark.parametrize("job", jobs(WITHOUT_SERVERS, quick=(1, 2, 4)))
def test_ranks_end_in_order(job: Job, pool: RankPool) -> None:
    pool.run(f"{CASES}:still_works")
    assert_ends_in_order(pool)


def assert_ends_in_order(pool: RankPool) -> None:
    """After the goodbye all processes end by themselves, and none complains."""
    answers = pool.leave()
    assert [a.error for a in answers if a is not None] == [""] * pool.job.num_ranks
    assert pool.ended_by_itself
    assert "Traceback" not in pool.ranks.log()
