"""Every compressor of sums and gathers over every backend: the same means, the bytes it says."""

from __future__ import annotations

import pytest

from tests.contracts.specs import DEFAULTS, MOVING, jobs
from tests.harness.compressors import SPECS, keeping
from tests.harness.rank_pool import Job, RankPool

CASES = "tests.contracts.compressor_cases"
# gtopk and oktopk deliver parts to single ranks, which is no verb of a backend yet.
CARRIED = tuple(s for s in SPECS if "gtopk" not in s and "oktopk" not in s)
# Of one size on all ranks, and large enough for every ring to be one.
EXACT = ("topk", "randomk:ratio=0.5", "ef-sign", "qsgd", "natural", "none")
NUM_ELEMENTS = 3 * 4 * 131_072


@pytest.mark.parametrize("job", jobs(MOVING, quick=(2,)))
def test_means_are_those_of_ranks_in_one_thread(job: Job, pool: RankPool) -> None:
    for spec in CARRIED:
        digests = pool.run(f"{CASES}:same_as_in_lockstep", keeping(spec), (700, 1, 0))
        assert len(set(digests)) == 1, spec


@pytest.mark.parametrize("job", jobs(DEFAULTS))
def test_bytes_between_workers_are_those_of_the_formula(job: Job, pool: RankPool) -> None:
    """A gather brings each rank the others' payloads; a sum costs what the backend says of it.

    Servers' helpers count what they move by themselves, so nothing is expected of them here.
    """
    for spec in EXACT:
        answers = pool.run(f"{CASES}:bytes_of_one_exchange", spec, NUM_ELEMENTS)
        for received_bytes, given, formula, is_sum, num_helpers in answers:
            assert given == formula, spec
            if pool.kind.in_process or num_helpers:
                continue
            factor = pool.kind.bus_factor(job.num_ranks) if is_sum else job.num_ranks - 1
            assert received_bytes == pytest.approx(formula * factor, rel=0.02), spec
