"""The bytes that backends count are those that their requests report and their formulas say."""

from __future__ import annotations

import pytest

from testbed.nouns import Traffic
from tests.contracts.specs import MOVING, jobs
from tests.harness.rank_pool import Job, RankPool

CASES = "tests.contracts.verb_cases"
NUM_ELEMENTS = 3 * 4 * 1024 * 256  # divisible by 1, 2, 3 and 4; beyond every switch for small sums
DEFAULTS = tuple(member for member in MOVING if member.is_default)


@pytest.mark.parametrize("job", jobs(MOVING))
def test_counters_are_the_sum_of_the_requests(job: Job, pool: RankPool) -> None:
    answers = pool.run(f"{CASES}:traffic_of_requests")
    counted = sum((a["counted"] for a in answers), Traffic())
    requests = sum((a["requests"] for a in answers), Traffic())
    # What leaves one rank reaches another: servers' shares appear on the other side.
    assert counted.sent_bytes == counted.received_bytes
    for answer in answers:
        assert answer["counted"].sent_bytes >= answer["requests"].sent_bytes
    if pool.num_servers == 0 and not any(_helped(a) for a in answers):
        assert counted == requests


def _helped(answer: dict[str, Traffic]) -> bool:
    """Whether something beside the requests' own thread moved bytes for this rank."""
    return answer["counted"] != answer["requests"]


@pytest.mark.parametrize("job", jobs(DEFAULTS))
def test_a_sum_moves_what_its_bus_factor_says(job: Job, pool: RankPool) -> None:
    """A ring of n moves 2 (n - 1) / n of the tensor over each link (Patarasuk and Yuan, 2009)."""
    within = 0.0 if pool.kind.in_process else 4 * NUM_ELEMENTS * pool.kind.bus_factor(job.num_ranks)
    for moved in pool.run(f"{CASES}:traffic_of_one_sum", NUM_ELEMENTS):
        assert moved.sent_bytes == within
        assert moved.received_bytes == within
