"""The bytes that backends count are those that their requests report and their formulas say."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.base.types import Op, Traffic
from tests.contracts.specs import DEFAULTS, MOVING, WITHOUT_SERVERS, jobs
from tests.harness.rank_pool import Job, RankPool

CASES = "tests.contracts.verb_cases"
NUM_ELEMENTS = 3 * 4 * 1024 * 256  # divisible by 1, 2, 3 and 4; beyond every switch for small sums
GLOO = tuple(m for m in DEFAULTS if m.text == "gloo")  # all of its bytes go through sockets
COUNTERS = Path("/proc/net/dev")
HALVED = (Op.ALL_REDUCE, Op.FOLD, Op.SPREAD, Op.ALL_GATHER)


@pytest.mark.parametrize("job", jobs(MOVING))
def test_counters_are_the_sum_of_the_requests(job: Job, pool: RankPool) -> None:
    """A helper beside a rank moves bytes for the requests of others; without one all is its own."""
    answers = pool.run(f"{CASES}:traffic_of_requests", (*HALVED, Op.BROADCAST))
    for counted, requests, num_helpers in answers:
        assert counted.sent_bytes >= requests.sent_bytes
        assert counted.received_bytes >= requests.received_bytes
        if num_helpers == 0:
            assert counted == requests


@pytest.mark.parametrize("job", jobs(WITHOUT_SERVERS))
def test_what_leaves_one_rank_reaches_another(job: Job, pool: RankPool) -> None:
    # How a library broadcasts to more than one other rank is hidden: each counts its own bound.
    ops = HALVED if job.num_ranks > 2 else (*HALVED, Op.BROADCAST)
    answers = pool.run(f"{CASES}:traffic_of_requests", ops)
    total = sum((counted for counted, _, _ in answers), Traffic())
    assert total.sent_bytes == total.received_bytes
    assert (total.sent_bytes > 0) == (job.num_ranks > 1 and not pool.facts.in_process)


@pytest.mark.parametrize("job", jobs(DEFAULTS))
def test_a_sum_moves_what_its_bus_factor_says(job: Job, pool: RankPool) -> None:
    """A ring of n moves 2 (n - 1) / n of the tensor over each link (Patarasuk and Yuan, 2009)."""
    within = (
        0.0 if pool.facts.in_process else 4 * NUM_ELEMENTS * pool.facts.bus_factor(job.num_ranks)
    )
    for moved in pool.run(f"{CASES}:traffic_of_one_sum", NUM_ELEMENTS):
        assert moved.sent_bytes == within
        assert moved.received_bytes == within


@pytest.mark.skipif(not COUNTERS.exists(), reason="the kernel does not tell what lo carried")
@pytest.mark.parametrize("op", [Op.ALL_REDUCE, Op.FOLD, Op.SPREAD])
@pytest.mark.parametrize("job", jobs(GLOO, counts=lambda n: n > 1))
def test_the_kernel_carries_what_the_library_is_said_to_move(
    job: Job, pool: RankPool, op: Op
) -> None:
    """A library may do more inside than the formula says: counted where it cannot hide."""
    before = _carried_bytes()
    answers = pool.run(f"{CASES}:many", op, NUM_ELEMENTS, 4)
    carried = _carried_bytes() - before
    said = sum(moved.sent_bytes for moved in answers)
    assert 0.99 * said <= carried <= 1.15 * said  # headers, acknowledgements, other programs


def _carried_bytes() -> int:
    (line,) = (x for x in COUNTERS.read_text().splitlines() if x.strip().startswith("lo:"))
    return int(line.partition(":")[2].split()[8])
