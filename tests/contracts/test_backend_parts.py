"""Parts reach the rank that they are for; payloads are merged as the reference does."""

from __future__ import annotations

import pytest

from testbed.base.types import Traffic
from tests.contracts.specs import MOVING, WITHOUT_SERVERS, jobs
from tests.contracts.test_backend_channels import by_priority
from tests.harness.rank_pool import Job, PoolKeeper, RankPool

CASES = "tests.contracts.part_cases"
MERGING = tuple(m for m in MOVING if m.text.startswith("zmq-ps"))


@pytest.mark.parametrize("job", jobs(MOVING))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8", "int64"])
def test_parts_of_unequal_sizes_are_delivered(job: Job, pool: RankPool, dtype: str) -> None:
    pool.run(f"{CASES}:delivers", dtype)


@pytest.mark.parametrize("job", jobs(MOVING))
def test_deliveries_of_many_keys_are_kept_apart(job: Job, pool: RankPool) -> None:
    pool.run(f"{CASES}:delivers_under_way", False)


@pytest.mark.parametrize("job", jobs(MOVING))
def test_deliveries_in_any_order_with_priorities(job: Job, pools: PoolKeeper) -> None:
    setup = by_priority(job)
    pools.with_setup(job, setup).run(f"{CASES}:delivers_under_way", True, setup=setup)


@pytest.mark.parametrize("job", jobs(WITHOUT_SERVERS))
def test_each_part_for_another_rank_crosses_once(job: Job, pool: RankPool) -> None:
    """Servers included; one that is not beside the destination passes parts on over the network."""
    relays = "colocated:" in job.backend
    answers = pool.run(f"{CASES}:traffic_of_delivers")
    for counted, requests, sent, received in answers:
        within = 0 if pool.facts.in_process else 1
        assert counted.received_bytes >= within * received
        assert counted.sent_bytes >= requests.sent_bytes
        if not relays:
            assert counted.sent_bytes == within * sent
            assert counted.received_bytes == within * received
    total = sum((counted for counted, _, _, _ in answers), Traffic())
    assert total.sent_bytes == total.received_bytes


@pytest.mark.parametrize("job", jobs(MERGING))
@pytest.mark.parametrize("any_order", [False, True])
def test_merged_payloads_are_the_reference_s(job: Job, pools: PoolKeeper, any_order: bool) -> None:
    setup = by_priority(job) if any_order else job.setup
    pools.with_setup(job, setup).run(f"{CASES}:merges", any_order, setup=setup)


@pytest.mark.parametrize("job", jobs(MERGING))
def test_ranges_that_servers_merge_are_the_merge_of_the_whole(job: Job, pool: RankPool) -> None:
    pool.run(f"{CASES}:merges_cut")


@pytest.mark.parametrize("job", jobs(MERGING))
def test_a_merge_moves_each_payload_up_once_and_one_down(job: Job, pool: RankPool) -> None:
    """The owner's host sends the merged payload to n - 1 others, and they their payloads to it."""
    answers = pool.run(f"{CASES}:traffic_of_merges")
    n = job.num_ranks
    _, pushed, pulled = answers[0]
    owners = 0
    for rank, (counted, _, _) in enumerate(answers):
        is_owner = counted.received_bytes == sum(pushed) - pushed[rank] and (
            counted.sent_bytes == (n - 1) * pulled
        )
        owners += is_owner
        if not is_owner:
            assert (counted.sent_bytes, counted.received_bytes) == (pushed[rank], pulled)
    assert owners == (0 if pool.num_servers else 1)  # dedicated servers are nobody's
