"""The contract under options of the ring that are no members of their own, on the ranks of one job.

What an option changes is how sums travel, so it is held to the contract's values, bytes and
channels; all else is the same code as the member's.
"""

from __future__ import annotations

from typing import Any

import pytest

from testbed.base.axes import BACKENDS
from tests.contracts.cases import DTYPES, FLOATS
from tests.contracts.specs import MEMBERS, Member, jobs
from tests.harness.rank_pool import Job, RankPool

CASES, SUMS = "tests.contracts.mpi_cases", "tests.contracts.sum_cases"
OPS, CHANNELS = "tests.contracts.verb_cases", "tests.contracts.channel_cases"

FLAT = "mpi-ring:switch_bytes=0,segment_kib=16"
DOUBLING = "mpi-ring:switch_bytes=16M"
PAIRS = "mpi-ring:switch_bytes=0,segment_kib=16,levels=2,group_size=2"
ALONE = "mpi-ring:switch_bytes=0,segment_kib=1,levels=2,group_size=1"

SIZES = (0, 1, 2, 3, 5, 1000, 70_001)
FEW_SIZES = (1, 5, 70_001)
NUM_ELEMENTS = 60_000


def members(*texts: str) -> list[Member]:
    return [member for member in MEMBERS if member.text in texts]


def with_options(num_ranks: int, *specs: str, on: str = "mpi-ring") -> list[Any]:
    """The job of a member with this number of ranks, which takes these options in turn."""
    found = jobs(members(on), lambda n: n == num_ranks)
    return [
        pytest.param(*job.values, spec, marks=job.marks, id=f"{job.id}-{spec}")
        for job in found
        for spec in specs
    ]


AMONG_OTHERS = (
    with_options(2, FLAT, DOUBLING, ALONE)
    + with_options(3, FLAT, DOUBLING)
    + with_options(4, FLAT, PAIRS, on="mpi-ring:levels=2,group_size=2")
)
every_option = pytest.mark.parametrize(("job", "spec"), with_options(1, FLAT) + AMONG_OTHERS)


@every_option
def test_every_op_brings_the_right_values(job: Job, spec: str, pool: RankPool) -> None:
    calls = [
        *((f"{SUMS}:exact_sums", (d, SIZES if d == "float32" else FEW_SIZES)) for d in DTYPES),
        *((f"{OPS}:fold_then_spread", (d, (0, 2, *FEW_SIZES))) for d in DTYPES),
        *((f"{SUMS}:{case}", ()) for case in ("shapes", "repeated_in_place", "repeated_fresh")),
        (f"{CASES}:parameter_is_summed", ()),
        *((f"{OPS}:gathers", (dtype,)) for dtype in ("int32", "bfloat16")),
        *((f"{OPS}:broadcasts", (dtype,)) for dtype in ("float64", "uint8")),
    ]
    pool.run(f"{CASES}:under", spec, calls)


@every_option
def test_sums_of_floats_are_alike_on_all_ranks(job: Job, spec: str, pool: RankPool) -> None:
    calls: list[Any] = [
        *((f"{SUMS}:float_sums", (d, SIZES if d == "float32" else FEW_SIZES)) for d in FLOATS),
        (f"{OPS}:halves_equal_a_sum", ()),
    ]
    if spec == FLAT:
        plain = f"{CASES}:same_bits_as_the_plain_ring"
        calls += [(plain, (DTYPES[d], SIZES if d == "float32" else FEW_SIZES)) for d in FLOATS]
    digests = pool.run(f"{CASES}:under", spec, calls)
    assert all(of_rank == digests[0] for of_rank in digests)


@pytest.mark.parametrize(("job", "spec"), AMONG_OTHERS)
def test_a_sum_moves_what_its_bus_factor_says(job: Job, spec: str, pool: RankPool) -> None:
    """In h groups of g as in one ring: 2 (g - 1) / g inside, 2 (h - 1) / (h g) between them."""
    num_bytes = 4 * NUM_ELEMENTS * job.num_ranks
    calls = [(f"{OPS}:traffic_of_one_sum", (num_bytes // 4,))]
    moved = [of_rank for (of_rank,) in pool.run(f"{CASES}:under", spec, calls)]
    if spec == DOUBLING:
        # The whole goes from each of two ranks to the other; a third gives its own, gets the sum.
        whole = {2: 2 * num_bytes, 3: 4 * num_bytes}[job.num_ranks]
        assert sum(traffic.sent_bytes for traffic in moved) == whole
        assert sum(traffic.received_bytes for traffic in moved) == whole
    else:
        within = num_bytes * BACKENDS.resolve(spec).facts.bus_factor(job.num_ranks)
        assert all(traffic.sent_bytes == traffic.received_bytes == within for traffic in moved)


@pytest.mark.parametrize(("job", "spec"), with_options(2, FLAT))
def test_channels_run_at_once_and_priorities_agree(job: Job, spec: str, pool: RankPool) -> None:
    for case in ("one_channel_does_not_hold_another", "all_channels_at_once"):
        pool.run(f"{CASES}:under", spec, [(f"{CHANNELS}:{case}", ())])
    pool.run(f"{CASES}:by_priority", spec, [(f"{CHANNELS}:any_order_with_priorities", ())])


@pytest.mark.parametrize(("job", "spec"), with_options(2, "mpi-ring", FLAT))
def test_a_switch_that_was_measured_holds(job: Job, spec: str, pool: RankPool) -> None:
    found = pool.run(f"{CASES}:switch_that_holds", spec)
    assert found == [found[0]] * job.num_ranks
    assert found[0] is not None


@pytest.mark.ends_job(2)  # MPI cannot be finalized: the lost peer would never answer
@pytest.mark.parametrize(("job", "spec"), with_options(2, FLAT) + with_options(2, "mpi", on="mpi"))
def test_losses_and_errors_end_by_name(job: Job, spec: str, pool: RankPool) -> None:
    pool.run(f"{CASES}:disagreement_ends_the_thread", spec)
    pool.run(f"{CASES}:loss_ends_the_thread", spec)
    pool.discard()


@pytest.mark.parametrize("job", jobs(members("mpi-ring"), lambda n: n == 1))
def test_refusals_have_words_and_requests_are_bounded(job: Job, pool: RankPool) -> None:
    pool.run(f"{CASES}:refusals")
    pool.run(f"{CASES}:persistent_requests_are_bounded")
