"""`testbed comm` as a user runs it: real processes, real backends."""

import subprocess
import sys

import msgspec
import psutil
import pytest

from testbed.records.comm import CommRecord
from tests.harness.runs import answer, end_family, testbed

SMALL = ("--min", "4K", "--max", "64K", "--factor", "16", "--iters", "4", "--warmup", "1")


def test_backends_with_and_without_mpi_and_servers_share_one_job(tmp_path):
    record = tmp_path / "comm.json"
    names = ["mpi-ring", "mpi", "mpi:blocking=1", "gloo", "zmq-ps", "zmq-ps:servers=dedicated:1"]
    done = testbed("comm", "--backend", ",".join(names), *SMALL, "--json", str(record))
    assert done.status == 0, done.err
    results = msgspec.json.decode(record.read_bytes(), type=CommRecord).results
    expected = [(size, name) for size in (4096, 65536) for name in names]
    assert [(r.num_bytes, r.backend) for r in results] == expected
    assert all(r.num_wrong == 0 and len(r.samples_s) == 4 for r in results)
    assert "# Out of bounds values : 0 OK" in done.out
    rows = [line for line in done.out.splitlines() if not line.startswith("#")]
    assert [(int(r.split()[1]), r.split()[0]) for r in rows] == expected


def test_servers_of_different_numbers_without_mpi(tmp_path):
    record = tmp_path / "comm.json"
    names = "zmq-ps:servers=dedicated:2,gloo,zmq-ps:servers=dedicated:1"
    short = (
        "-b",
        "4K",
        "-e",
        "64K",
        "-f",
        "16",
        "-n",
        "4",
        "-w",
        "1",
        "-c",
        "2",
        "-J",
        str(record),
    )
    of_osu = ("--op", "fold-spread", "--format", "osu")
    done = testbed("comm", "--backend", names, *short, *of_osu)
    assert done.status == 0, done.err
    rows = [line.split() for line in done.out.splitlines() if line and line[0] != "#"]
    assert [(int(size), int(n)) for size, *_, n in rows] == [(4096, 4), (65536, 4)] * 3
    assert all(float(low) <= float(mean) <= float(high) for _, mean, low, high, _ in rows)
    written = msgspec.json.decode(record.read_bytes(), type=CommRecord)
    assert written.environment["num_servers"] == 2
    assert all(r.num_wrong == 0 for r in written.results)


def test_a_launcher_is_joined():
    under = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python")
    sizes = ("--minbytes", "4K", "--maxbytes", "4K", "--iters", "2")
    done = testbed("comm", "--backend", "gloo,zmq-ps", "-I", *sizes, under=under, fresh=False)
    assert done.status == 0, done.err
    assert "launcher: torchrun" in done.out
    row = next(line.split() for line in done.out.splitlines() if line.startswith("  gloo"))
    time_us, (least_us, most_us, p99_us, _) = float(row[5]), map(float, row[-4:])
    assert least_us <= time_us <= p99_us <= most_us


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "gloo", "--min", "1M", "--max", "1K"], "expected min <= max"),
        (["--backend", "gloo", "--fit", "-I"], "leave out -I and --format"),
        (["--backend", "gloo", "-n", "2", "-c", "3"], "--check is 3 but --iters is 2"),
        (["--backend", "loopback"], "joins threads of one process"),
        (["--backend", "gloo", "--max", "much"], "size is 'much'"),
    ],
)
def test_what_cannot_be_measured_is_a_usage_error(arguments, message):
    done = answer("comm", *arguments)
    assert done.status == 2
    assert message in done.err


def test_a_killed_rank_ends_the_job_and_is_named():
    endless = ("--min", "4K", "--max", "64K", "--iters", "1000000", "--deadline", "5")
    command = [sys.executable, "-m", "testbed", "comm", "--backend", "gloo,zmq-ps", *endless]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            while not process.stdout.readline().startswith("# backend"):
                assert process.poll() is None
            ranks = psutil.Process(process.pid).children()
            assert len(ranks) == 2
            family = [p for rank in ranks for p in (rank, *rank.children(recursive=True))]
            max(ranks, key=lambda rank: int(rank.environ()["TESTBED_RANK"])).kill()
            _, err = process.communicate(timeout=40)
        except BaseException:
            end_family(process.pid)
            raise
    assert process.returncode == 1
    assert "rank 1" in err
    assert "gloo/1024" in err or "zmq-ps/1024" in err  # what the survivor was doing
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
