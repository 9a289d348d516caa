"""Channels run at once; within one, requests run in order, or in the order that rank 0 decides."""

from __future__ import annotations

import pytest

from tests.contracts.specs import MOVING, jobs, many
from tests.harness.rank_agent import Setup
from tests.harness.rank_pool import Job, PoolKeeper, RankPool

CASES = "tests.contracts.channel_cases"
SEVERAL = tuple(member for member in MOVING if member.max_channels > 1)


@pytest.mark.parametrize("job", jobs(MOVING))
def test_all_channels_at_once(job: Job, pool: RankPool) -> None:
    pool.run(f"{CASES}:all_channels_at_once")


@pytest.mark.parametrize("job", jobs(SEVERAL))
def test_one_channel_does_not_hold_another(job: Job, pool: RankPool) -> None:
    pool.run(f"{CASES}:one_channel_does_not_hold_another")


@pytest.mark.parametrize("job", jobs(MOVING))
def test_any_order_with_priorities(job: Job, pools: PoolKeeper) -> None:
    setup = by_priority(job)
    pools.with_setup(job, setup).run(f"{CASES}:any_order_with_priorities", setup=setup)


@pytest.mark.parametrize("job", jobs(MOVING, many))
def test_the_most_urgent_goes_next(job: Job, pools: PoolKeeper) -> None:
    setup = by_priority(job)
    ranks = pools.with_setup(job, setup)
    begun = ranks.run(f"{CASES}:most_urgent_goes_next", setup=setup)
    for keys in begun:  # of two equally urgent ones the first that rank 0 submitted
        assert keys == ["hold", "f", "d", "b", "g", "a", "e", "c"]


@pytest.mark.parametrize("job", jobs(MOVING, many))
def test_older_steps_go_first(job: Job, pools: PoolKeeper) -> None:
    setup = by_priority(job)
    ranks = pools.with_setup(job, setup)
    for begun in ranks.run(f"{CASES}:older_steps_go_first", setup=setup):
        assert begun == [(1, "hold"), (2, "old"), (3, "young")]


def by_priority(job: Job) -> Setup:
    return Setup("priority", min(2, job.setup.num_channels))
