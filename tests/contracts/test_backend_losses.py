"""A rank that dies in the middle of a sum is named on every other, and nobody lives on."""

from __future__ import annotations

import re

import psutil
import pytest

from testbed.base.types import Op
from tests.contracts.specs import DEFAULTS, MOVING, WITH_SERVERS, WITHOUT_SERVERS, jobs
from tests.harness.rank_pool import Job, RankPool

CASE = "tests.contracts.usage_cases:lose_a_rank"
TOLD_S = 30.0
GONE_S = 20.0


def two_or_three(num_ranks: int) -> bool:
    return num_ranks in (2, 3)


@pytest.mark.ends_job(2)
@pytest.mark.parametrize(
    "job", jobs(WITHOUT_SERVERS, two_or_three, quick=(3,)) + jobs(WITH_SERVERS, two_or_three)
)
def test_a_lost_rank_is_named_by_all_others(job: Job, pool: RankPool) -> None:
    check_loss(pool, victim=job.num_ranks - 1, midway=job.num_ranks == 3)


@pytest.mark.ends_job(2)
@pytest.mark.parametrize("job", jobs(DEFAULTS, two_or_three, quick=(3,)))
def test_a_rank_that_is_lost_in_a_delivery_is_named(job: Job, pool: RankPool) -> None:
    check_loss(pool, victim=job.num_ranks - 1, midway=job.num_ranks == 3, op=Op.ALL_TO_ALL)


@pytest.mark.slow
@pytest.mark.ends_job(2)
@pytest.mark.parametrize("job", jobs(MOVING, two_or_three))
def test_rank_0_is_named_too(job: Job, pool: RankPool) -> None:
    check_loss(pool, victim=0, midway=job.num_ranks == 2)


def check_loss(pool: RankPool, victim: int, midway: bool, op: Op = Op.ALL_REDUCE) -> None:
    processes = pool.processes()
    as_process = not pool.facts.in_process
    answers = pool.answers(CASE, victim, midway, as_process, op, within_s=TOLD_S)
    for rank, answer in enumerate(answers):
        if rank == victim:
            assert answer is None or not as_process
        elif answer is None:
            # mpirun ends the survivors itself; then it says whose end was the first.
            assert pool.facts.needs_mpi, f"rank {rank} died too\n{pool.ranks.log()}"
        else:
            assert not answer.error, answer.error
            last = answer.result[-1]
            assert f"rank {victim}" in last, last
            assert "'weight'" in last, last
            assert "step 8" in last, last
    pool.leave(GONE_S)
    _, alive = psutil.wait_procs(processes, timeout=GONE_S)
    assert not alive
    if answers.count(None) == len(answers):
        assert re.search(rf"rank {victim}\b|,{victim}\]", pool.ranks.log()), pool.ranks.log()
