"""Results, table and record of the micro-benchmark."""

import json

import msgspec
import pytest

from testbed.base.files import to_json
from testbed.microbench.config import Size, reproduce
from testbed.microbench.contestants import resolve
from testbed.microbench.measure import SizeSamples
from testbed.microbench.results import results_of, total_wrong
from testbed.microbench.table import footer, header, osu, row
from testbed.records.comm import CommConfig, CommRecord

NAMES = ("mpi-ring", "zmq-ps:servers=dedicated:1")
CONFIG = CommConfig(backend=NAMES, workers=4, iters=3)
RING_S = ((0.001, 0.0005, 0.002), (0.0005, 0.003, 0.0005))  # of each rank
SAMPLES = SizeSamples(Size(1_000_000, 250_000), (RING_S, ((0.004,) * 3,) * 2), (0, 7))


@pytest.fixture
def results():
    return results_of(CONFIG, resolve(NAMES), SAMPLES)


def test_results_are_medians_and_their_bandwidths(results):
    ring, server = results
    assert (ring.backend, ring.num_workers, ring.num_bytes, ring.count) == (
        *("mpi-ring", 4, 1_000_000, 250_000),
    )
    assert ring.time_s == 0.002
    assert ring.time_p5_s == pytest.approx(0.0011)
    assert ring.time_p95_s == pytest.approx(0.0029)
    assert ring.algbw_bytes_per_s == pytest.approx(5e8)
    assert ring.busbw_bytes_per_s == pytest.approx(7.5e8)
    assert ring.samples_s == [0.001, 0.003, 0.002]
    assert ring.fastest_s == 0.0005
    assert ring.rank_means_s == pytest.approx([0.0035 / 3, 0.004 / 3])
    assert server.busbw_bytes_per_s == pytest.approx(4 * server.algbw_bytes_per_s)
    assert total_wrong(results) == 7


def test_the_table_has_the_columns_of_nccl_tests(results):
    names, units = header(CONFIG, ("h1", "h1", "h2", "h2"), "openmpi").splitlines()[-2:]
    assert names.split() == [
        *("#", "backend", "size", "count", "type", "redop", "time", "algbw", "busbw", "#wrong"),
    ]
    assert units.split() == ["#", "(B)", "(elements)", "(us)", "(GB/s)", "(GB/s)"]
    line = row(CONFIG, results[0])
    assert line.split() == [
        *("mpi-ring", "1000000", "250000", "float32", "sum", "2000.00", "0.500", "0.750", "0"),
    ]
    # every number ends where the name of its column ends
    for word, name in zip(line.split()[1:], names.split()[2:], strict=True):
        assert line.rstrip("\n")[: names.index(name) + len(name)].endswith(word)


def test_columns_of_single_exchanges_are_added(results):
    names = header(CONFIG, ("h1",), "openmpi", per_iteration=True).splitlines()[-2]
    line = row(CONFIG, results[0], per_iteration=True)
    assert line.split()[:9] == row(CONFIG, results[0]).split()
    assert names.split()[-4:] == ["min", "max", "p99", "cv"]
    # cv of 1, 3 and 2 ms: sqrt(2 / 3) / 2
    assert line.split()[-4:] == ["1000.00", "3000.00", "2980.00", "40.8"]
    assert len(line.rstrip()) == len(names)


def test_the_columns_of_the_osu_benchmarks(results):
    ring, _, server = osu(CONFIG, results).partition("\n\n")
    title, dtype, names, *rows = ring.splitlines()
    assert title == "# testbed sum latency test: mpi-ring, 4 workers"
    assert dtype == "# Datatype: float32."
    assert names.split("  ")[0] == "# Size"
    assert [row.split() for row in rows] == [["1000000", "1250.00", "1166.67", "1333.33", "3"]]
    assert len(rows[0]) == len(names)
    assert server.splitlines()[-1] == "# Out of bounds values : 7 FAILED"
    assert "FAILED" not in osu(CONFIG, results[:1])


def test_the_header_says_how_it_was_measured():
    text = header(CONFIG, ("h1", "h1", "h2", "h2"), "openmpi")
    for words in ("workers: 4 on 2 host(s): h1, h2", "launcher: openmpi", "warm-up: 5, timed: 3"):
        assert words in text
    assert all(line.startswith("#") for line in text.splitlines())


def test_the_footer_sums_up(results):
    text = footer(CONFIG, results)
    assert "# Out of bounds values : 7 FAILED" in text
    assert "# Avg bus bandwidth    : 0.875" in text
    assert "#   mpi-ring                   : 0.750" in text
    alone = footer(CommConfig(backend=NAMES[:1]), results[:1])
    assert alone == "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 0.750\n"


def test_what_was_not_checked_is_no_zero(results):
    unchecked = msgspec.structs.replace(results[0], num_wrong=None)
    assert row(CONFIG, unchecked).split()[-1] == "N/A"


def test_a_record_comes_back_as_it_was_written(results):
    record = CommRecord(
        results=results, config=CONFIG, environment={"host": "h1"}, command=reproduce(CONFIG)
    )
    data = to_json(record)
    assert msgspec.json.decode(data, type=CommRecord) == record
    plain = json.loads(data)
    assert plain["schema"] == "testbed.comm/1"
    assert plain["config"]["backend"] == list(NAMES)
    assert plain["command"].startswith(
        "testbed comm --backend mpi-ring,zmq-ps:servers=dedicated:1 "
    )
    assert set(plain["results"][0]) >= {
        *("backend", "num_workers", "num_bytes", "time_s", "algbw_bytes_per_s"),
        *("busbw_bytes_per_s", "num_wrong", "samples_s"),
    }


def test_a_file_of_another_schema_is_refused():
    other = b'{"schema":"testbed.cell/1","results":[],"config":{"backend":["gloo"]}}'
    with pytest.raises(msgspec.ValidationError, match="schema"):
        msgspec.json.decode(other, type=CommRecord)
