"""One exchange of each kind over each backend, and how our ring stands beside the library's.

    pytest tests/benchmarks/test_bench_exchanges.py --benchmark-only

A round is one exchange, its time that of the slowest rank by its own clock after a barrier;
`extra_info` has the bandwidths of the median round as nccl-tests defines them.
"""

import statistics

import msgspec
import pytest

from testbed.base.axes import BACKENDS as REGISTERED
from testbed.microbench.bandwidth import algbw_bytes_per_s, bus_factor, busbw_bytes_per_s
from testbed.records.comm import CommRecord
from tests.benchmarks.cells import MIB, exchanges
from tests.benchmarks.conftest import describe
from tests.harness.bench_cases import VERBS
from tests.harness.benchmarking import FIFO, least, slowest
from tests.harness.runs import testbed

WARMUP = 5
LARGEST = 64 << 20
AT_MOST = {"mpi": 0.6, "gloo": 0.4}
NOT_SLOWER_FROM = 1 << 20
OPERATIONS = {"all-reduce": "sum", "fold+spread": "fold-spread", "broadcast": "broadcast"}


@pytest.mark.parametrize(("backend", "num_ranks", "verb", "num_bytes"), exchanges())
def test_exchange(benchmark, clock, ranks, backend, num_ranks, verb, num_bytes):
    rounds = min(60, max(10, 64 * MIB // max(num_bytes, 1)))
    case = ("tests.harness.bench_cases:time_verb", verb, num_bytes, WARMUP, rounds)
    by_rank_s = ranks.run(backend, num_ranks, FIFO, *case)
    # What a rank gives to others is (n - 1) / n of an all-to-all, as of a gather.
    operation = OPERATIONS.get(verb, "gather")
    of_sum = REGISTERED.resolve(backend).facts.bus_factor(num_ranks)
    factor = bus_factor(operation, num_ranks, of_sum)
    bandwidths = {}
    if num_bytes:
        time_s = statistics.median(slowest(by_rank_s))
        bandwidths = {
            "algbw_bytes_per_s": algbw_bytes_per_s(num_bytes, time_s),
            "busbw_bytes_per_s": busbw_bytes_per_s(num_bytes, time_s, factor),
        }
    describe(
        benchmark,
        f"{verb}, {num_ranks} ranks, {num_bytes} bytes",
        num_bytes=num_bytes,
        ranks=num_ranks,
        cross_rank_min_s=least(by_rank_s),
        configuration={"backend": backend, "ops": list(VERBS[verb]), "warmup": WARMUP},
        **bandwidths,
    )
    clock.replay(benchmark, slowest(by_rank_s))


@pytest.mark.mpi
def test_ring_beside_library_and_gloo(benchmark, tmp_path):
    """Backends take turns in one job, so the ratios hold on a machine of any speed.

    They are meant for two ranks with a core each and nothing else running.
    """
    record = tmp_path / "comm.json"
    sizes = ("-b", "64K", "-e", "64M")
    arguments = ("--backend", "mpi-ring,mpi,gloo", "--workers", "2", *sizes, "-J", str(record))
    done = benchmark.pedantic(testbed, ("comm", *arguments), rounds=1)
    assert done.status == 0, done.err
    results = msgspec.json.decode(record.read_bytes(), type=CommRecord).results
    time_s = {(r.num_bytes, r.backend): r.time_s for r in results}
    ratios = {
        (num_bytes, other): time_s[num_bytes, "mpi-ring"] / time_s[num_bytes, other]
        for num_bytes, name in time_s
        if name == "mpi-ring"
        for other in AT_MOST
    }
    shown = {f"{size} bytes: mpi-ring / {other}": r for (size, other), r in ratios.items()}
    describe(benchmark, "ring beside library", **shown)
    slower = {at: ratio for at, ratio in ratios.items() if at[0] >= NOT_SLOWER_FROM and ratio > 1}
    assert not slower
    for other, bound in AT_MOST.items():
        assert ratios[LARGEST, other] <= bound, ratios
