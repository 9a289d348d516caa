"""Every compressor over every backend: the means of ranks in one thread, the bytes it says."""

from __future__ import annotations

import pytest

from testbed.base.axes import BACKENDS
from testbed.base.types import Op, Traffic
from tests.contracts.compressor_cases import Exchange
from tests.contracts.specs import DEFAULTS, MOVING, jobs
from tests.harness.compressors import SPECS, keeping
from tests.harness.rank_pool import Job, RankPool
from tests.harness.wire_bytes import round_bytes

CASES = "tests.contracts.compressor_cases"
NUM_ELEMENTS = 60_000
WITHIN = 0.02


@pytest.mark.parametrize("job", jobs(MOVING, quick=(2,)))
def test_means_are_those_of_ranks_in_one_thread(job: Job, pool: RankPool) -> None:
    for spec in SPECS:
        digests = pool.run(f"{CASES}:same_as_in_lockstep", keeping(spec), (700, 1, 0))
        assert len(set(digests)) == 1, spec


@pytest.mark.parametrize("job", jobs(DEFAULTS))
def test_bytes_between_workers_are_those_of_the_formulas(job: Job, pool: RankPool) -> None:
    """What a rank hands over is the compressor's formula, what travels the backend's of that."""
    if BACKENDS.resolve(job.backend).name not in BACKENDS.builtin and pool.facts.algorithm is None:
        pytest.skip(f"{job.backend} declares no algorithm, hence no formula of its bytes")
    ops: set[Op] = set()
    for spec in SPECS:
        answers = pool.run(f"{CASES}:exchanges", spec, NUM_ELEMENTS)
        for step, of_ranks in enumerate(zip(*answers, strict=True)):
            for exchange in of_ranks:
                check_one_rank(exchange, pool, f"{spec} in step {step}")
            check_all_ranks(of_ranks, job, pool, f"{spec} in step {step}")
            ops |= {carried.op for carried in of_ranks[0].rounds}
    merging = {Op.MERGE} if job.backend == "zmq-ps" else set()
    assert ops == {Op.ALL_REDUCE, Op.ALL_GATHER, Op.ALL_TO_ALL} | merging


def check_one_rank(exchange: Exchange, pool: RankPool, what: str) -> None:
    given = sum(carried.given_bytes for carried in exchange.rounds)
    least, most = exchange.formula_bytes
    assert least <= given <= most, what
    requests = sum((carried.traffic for carried in exchange.rounds), Traffic())
    if pool.job.backend == "zmq-ps":  # a server beside a worker moves bytes of others' requests
        assert exchange.counted.sent_bytes >= requests.sent_bytes, what
    else:
        assert exchange.counted == requests, what


def check_all_ranks(of_ranks: tuple[Exchange, ...], job: Job, pool: RankPool, what: str) -> None:
    least = most = 0
    for carried in zip(*(exchange.rounds for exchange in of_ranks), strict=True):
        assert len({one.op for one in carried}) == 1, what
        bounds = round_bytes(
            job.backend,
            carried[0].op,
            [one.given_bytes for one in carried],
            answer_bytes=carried[0].answer_bytes,
            element_bytes=carried[0].element_bytes,
            switch_bytes=of_ranks[0].switch_bytes,
        )
        least, most = least + bounds[0], most + bounds[1]
    total = sum((exchange.counted for exchange in of_ranks), Traffic())
    assert total.sent_bytes == total.received_bytes, what
    assert (1 - WITHIN) * least <= total.sent_bytes <= (1 + WITHIN) * most, (what, least, most)
    assert (total.sent_bytes > 0) == (job.num_ranks > 1 and not pool.facts.in_process), what
