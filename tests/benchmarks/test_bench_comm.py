"""How our ring stands beside the library's all-reduce and Gloo, as a ratio within one job.

    pytest tests/benchmarks/test_bench_comm.py --benchmark-only

The backends take turns in the same job, so the ratios hold on a machine of any speed. They are
meant for two ranks with a core each and nothing else running.
"""

import msgspec
import pytest

from testbed.records.comm import CommRecord
from tests.harness.runs import testbed

LARGEST = 64 << 20
AT_MOST = {"mpi": 0.6, "gloo": 0.4}
NOT_SLOWER_FROM = 1 << 20


@pytest.mark.mpi
def test_ring_beside_library_and_gloo(benchmark, tmp_path):
    record = tmp_path / "comm.json"
    sizes = ("--min", "64K", "--max", "64M")
    arguments = ("--backend", "mpi-ring,mpi,gloo", "--workers", "2", *sizes, "--json", str(record))
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
    for (num_bytes, other), ratio in ratios.items():
        benchmark.extra_info[f"{num_bytes} bytes: mpi-ring / {other}"] = round(ratio, 3)
    slower = {at: ratio for at, ratio in ratios.items() if at[0] >= NOT_SLOWER_FROM and ratio > 1}
    assert not slower
    for other, bound in AT_MOST.items():
        assert ratios[LARGEST, other] <= bound, ratios
