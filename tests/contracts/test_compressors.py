"""Every compressor of sums and gathers over every backend: the same means, the bytes it says."""

from __future__ import annotations

import pytest

from tests.contracts.specs import DEFAULTS, MOVING, jobs
from tests.harness.compressors import SPECS, keeping
from tests.harness.rank_pool import Job, RankPool

CASES = "tests.contracts.compressor_cases"
# gtopk and oktopk deliver parts to single ranks, which is no verb of a backend yet.
CARRIED = tuple(s for s in SPECS if "gtopk" not in s and "oktopk" not in s)
EXACT = ("topk", "randomk", "ef-sign", "qsgd", "natural", "fp16", "none")
NUM_ELEMENTS = 3 * 4 * 65_536


@pytest.mark.parametrize("job", jobs(MOVING))
def test_means_are_those_of_ranks_in_one_thread(job: Job, pool: RankPool) -> None:
    for spec in CARRIED:
        digests = pool.run(f"{CASES}:same_as_in_lockstep", keeping(spec), (700, 1, 0))
        assert len(set(digests)) == 1, spec


@pytest.mark.parametrize("job", jobs(DEFAULTS))
@pytest.mark.parametrize("spec", EXACT)
def test_bytes_on_the_wire_are_those_of_the_formula(job: Job, pool: RankPool, spec: str) -> None:
    others = job.num_ranks - 1
    for traffic, given, formula, is_sum in pool.run(
        f"{CASES}:bytes_of_one_exchange", spec, NUM_ELEMENTS
    ):
        assert given == formula
        if pool.kind.in_process:
            continue
        expected = formula * pool.kind.bus_factor(job.num_ranks) if is_sum else formula * others
        assert traffic.received_bytes == pytest.approx(expected, rel=0.02)
