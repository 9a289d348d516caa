"""Emulated clusters: real runs in them, what they are held to, and that nothing of them stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from testbed.cluster.system import NETNS_FOLDER, PREFIX, lacking
from testbed.launch.allocation import GRACE_S
from testbed.sweeping.run import INTERRUPTED
from tests.harness.runs import FAULTY, answer, end_family, testbed, wait_for

HARNESS = Path(__file__).parents[1] / "harness"
HEADERS = 1514 / 1448  # Ethernet, IP and TCP with time stamps around 1448 bytes of payload
WITHIN_S = 60.0
DEADLINE_S = 4
SPARE_S = 10.0  # for processes to end on a busy machine; what hangs takes until the harness ends it
STREAM_PORT = 7001  # of between_nodes.sh

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(lacking() is not None, reason=str(lacking())),
]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's names are his own alone")
MODEL = ("--workload", f"{FAULTY}:build", "--steps", "10", "--warmup", "2", "--verify-steps", "5")


def namespaces() -> set[str]:
    return set(os.listdir(NETNS_FOLDER)) if NETNS_FOLDER.is_dir() else set()


def ours(pid: int) -> list[str]:
    """Namespaces that the process owns."""
    return [name for name in namespaces() if name.startswith(f"{PREFIX}{pid}-")]


def folders(pid: int) -> list[Path]:
    return list(Path(os.environ.get("TMPDIR", "/tmp")).glob(f"{PREFIX}{pid}-*"))


@contextmanager
def sleeping_cluster(*more: str, then: str = "sleep 1000") -> Iterator[subprocess.Popen[str]]:
    """`testbed cluster` around a command that is up and sleeps, or does something else for long."""
    command = [sys.executable, "-m", "testbed", "cluster", "--nodes", "2", *more]
    with subprocess.Popen(
        [*command, "--", "sh", "-c", f"hostname; exec {then}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "node1\n"
            yield process
        finally:
            process.terminate()
            try:
                process.wait(WITHIN_S)
            except subprocess.TimeoutExpired:
                end_family(process.pid)
                raise


@pytest.mark.parametrize(
    "backend",
    ["gloo", *(pytest.param(b, marks=pytest.mark.slow) for b in ("mpi-ring", "mpi", "zmq-ps"))],
)
def test_a_run_in_a_cluster(backend: str, tmp_path: Path) -> None:
    record = tmp_path / "cell.json"
    cluster = "nodes=3,rate=1gbit,up.2=500mbit,latency=1ms,latency_by=injected"
    done = testbed("run", *MODEL, "--backend", backend, "--cluster", cluster, "--json", str(record))
    assert done.status == 0, done.err
    cell = json.loads(record.read_text())
    assert cell["identical_work"] is True, cell["identical_work_note"]
    assert (cell["num_workers"], cell["num_machines"], cell["dilation"]) == (3, 3, 1.0)
    assert cell["cluster"]["latency"] == "injected"
    assert cell["cluster"]["links"][1]["kernel_up_bps"] == 5e8
    assert f"--cluster {cell['cluster']['spec']}" in cell["command"]
    # Every exchange waited.
    assert min(cell["samples"]["step_time_s"]) >= 1e-3


@pytest.mark.parametrize(
    "backend",
    [
        "mpi-ring",
        *(pytest.param(b, marks=pytest.mark.slow) for b in ("gloo", "mpi", "zmq-ps", "ddp")),
    ],
)
def test_a_node_that_is_cut_off_is_named_within_the_deadline(backend: str, tmp_path: Path) -> None:
    record, note = tmp_path / "cell.json", tmp_path / "cut"
    done = testbed(
        "run",
        *("--workload", f"{FAULTY}:build:fault=cut,rank=1,at=3,note={note}", "--verify-steps", "0"),
        *("--cluster", "nodes=2,rate=1gbit", "--backend", backend, "--steps", "1000"),
        *("--deadline", str(DEADLINE_S), "--json", str(record)),
    )
    assert done.status == 1, done.err
    assert "RankLost: rank 1 " in done.err
    cell = json.loads(record.read_text())
    assert (cell["status"], cell["cluster"]["nodes"]) == ("failed", 2)
    assert "rank 1" in cell["error"]
    # The record is written once all ranks have ended, by themselves or after the grace they have.
    assert record.stat().st_mtime - float(note.read_text()) < DEADLINE_S + GRACE_S + SPARE_S


@as_root
def test_what_a_killed_owner_left_is_gone_after_the_next_start() -> None:
    with sleeping_cluster() as bystander, sleeping_cluster() as victim:
        assert len(ours(victim.pid)) == len(ours(bystander.pid)) == 3
        victim.send_signal(signal.SIGKILL)
        victim.wait(WITHIN_S)
        assert len(ours(victim.pid)) == 3
        done = testbed("cluster", "--nodes", "2", "--", "hostname")
        assert (done.status, done.out) == (0, "node1\n")
        assert not ours(victim.pid)
        assert not folders(victim.pid)
        assert len(ours(bystander.pid)) == 3
    assert not ours(bystander.pid)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_cluster_that_is_interrupted_is_taken_down(signum: signal.Signals) -> None:
    with sleeping_cluster() as process:
        process.send_signal(signum)
        assert process.wait(WITHIN_S) == 128 + signum
        assert not ours(process.pid)
        assert not folders(process.pid)


def test_two_clusters_at_once_do_not_hear_each_other() -> None:
    # In both, node 2 has the same address and listens on the port; it ends once it was sent enough.
    receiving = f"{sys.executable} {HARNESS / 'stream.py'} receive {STREAM_PORT} 4096"
    listens = f'"$TESTBED_ENTER" node2 "{receiving}"'
    with sleeping_cluster(then=listens) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "listening\n"
        done = testbed("cluster", "--nodes", "2", "--", *stream(1, 2, 1 << 20), within_s=WITHIN_S)
        assert done.status == 0, done.err
        assert float(done.out) > 0
        assert other.poll() is None


def test_the_exit_status_is_the_command_s() -> None:
    assert testbed("cluster", "--nodes", "1", "--", "sh", "-c", "exit 7").status == 7


@pytest.mark.parametrize("policy", ["batch", "other"])
def test_whatever_runs_on_a_node_has_the_cpu_policy_asked_for(policy: str) -> None:
    tell = f"{sys.executable} -c 'import os; print(os.sched_getscheduler(0))'"
    spec = "nodes=2" if policy == "batch" else f"nodes=2,cpu_policy={policy}"
    words = f'{tell}; $TESTBED_ENTER node2 "{tell}"'
    done = testbed("cluster", "--spec", spec, "--", "sh", "-c", words)
    assert done.status == 0, done.err
    wanted = os.SCHED_BATCH if policy == "batch" else os.sched_getscheduler(0)
    assert done.out.split() == [str(wanted)] * 2


@pytest.mark.parametrize("cores", ["auto", "pinned", "shared"])
def test_whatever_runs_on_a_node_keeps_to_its_cores_where_they_go_round(cores: str) -> None:
    tell = f"{sys.executable} -c 'import os; print(*sorted(os.sched_getaffinity(0)))'"
    words = f'{tell}; $TESTBED_ENTER node2 "{tell}"'
    done = testbed("cluster", "--spec", f"nodes=2,cores={cores}", "--", "sh", "-c", words)
    assert done.status == 0, done.err
    mine = sorted(os.sched_getaffinity(0))
    half = len(mine) // 2
    pin_cores = [mine[:half], mine[half : 2 * half]] if cores != "shared" and half else [mine, mine]
    assert done.out.splitlines() == [" ".join(map(str, node)) for node in pin_cores]


@pytest.mark.parametrize("asked", ["auto", "no"])
def test_cores_are_kept_awake_where_that_is_allowed(asked: str) -> None:
    tell = f"{sys.executable} {HARNESS / 'core_latency.py'}"
    before = testbed("cluster", "--spec", "nodes=1,awake=no", "--", "sh", "-c", tell)
    done = testbed(
        *("cluster", "--spec", f"nodes=1,awake={asked}", "--"),
        *("sh", "-c", f'{tell}; cat "$TESTBED_CLUSTER"'),
    )
    assert (before.status, done.status) == (0, 0), done.err
    latency_us, facts = done.out.split("\n", 1)
    held = json.loads(facts)["record"]["cores_awake"]
    if asked == "auto" and os.access("/dev/cpu_dma_latency", os.W_OK):
        assert (latency_us, held) == ("0", "yes")
    else:
        assert latency_us == before.out.strip()
        assert held.startswith("no")


def test_cores_that_do_not_go_round_are_refused_when_asked_for() -> None:
    nodes = len(os.sched_getaffinity(0)) + 1
    if nodes == 2:
        pytest.skip("one core goes round any number of nodes")
    done = answer("cluster", "--spec", f"nodes={nodes},cores=pinned", "--", "true")
    assert done.status == 2
    assert f"cannot be dealt out evenly to {nodes} nodes" in done.err
    assert testbed("cluster", "--spec", f"nodes={nodes}", "--", "true").status == 0


def test_a_cluster_within_a_cluster_is_refused() -> None:
    inner = (sys.executable, "-m", "testbed", "cluster", "--", "true")
    done = testbed("cluster", "--nodes", "1", "--", *inner)
    assert done.status == 2
    assert "inside an emulated cluster already" in done.err


def stream(source: int, target: int, num_bytes: int, after_changes: int = 0) -> tuple[str, ...]:
    words = (str(source), str(target), str(num_bytes), sys.executable, str(HARNESS))
    return ("sh", str(HARNESS / "between_nodes.sh"), *words, str(after_changes))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "source", "target", "bps", "changes"),
    [
        ("nodes=2,rate=1gbit,dilation=10", 1, 2, 1e8, 0),
        ("nodes=2,rate=200mbit", 2, 1, 2e8, 0),
        ("nodes=3,rate=400mbit,up.2=50mbit", 2, 3, 5e7, 0),
        ("nodes=3,rate=400mbit,up.2=50mbit", 3, 2, 4e8, 0),
        ("nodes=3,rate=400mbit,down.2=50mbit", 3, 2, 5e7, 0),
        ("nodes=2,rate=400mbit,change=100ms:2:50mbit", 1, 2, 5e7, 1),
        ("nodes=2,rate=50mbit,change=100ms:all:200mbit", 2, 1, 2e8, 1),
    ],
)
def test_measured_rates_are_those_asked_for(
    spec: str, source: int, target: int, bps: float, changes: int
) -> None:
    command = stream(source, target, round(bps / 8 * 2), changes)  # two seconds' worth
    done = testbed("cluster", "--spec", spec, "--", *command, within_s=WITHIN_S)
    assert done.status == 0, done.err
    assert float(done.out) * HEADERS / bps == pytest.approx(1, abs=0.05)


WITH_LITTLE_GRACE = """
import sys
from testbed.launch.allocation import run_in_cluster
sys.exit(run_in_cluster(sys.argv[1], sys.argv[2:], grace_s=0.5))
"""


def test_a_change_that_cannot_be_made_fails_the_run() -> None:
    away = "ip link delete tb0"  # with its other end, whose rate is to change
    told = 'until grep -q "was not made" "$TESTBED_CLUSTER"; do sleep 0.1; done; echo told'
    spec = "nodes=2,rate=400mbit,change=1s:1:50mbit"
    done = subprocess.run(
        [sys.executable, "-c", WITH_LITTLE_GRACE, spec, "sh", "-c", f"{away}; {told}; sleep 1000"],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
    )
    assert (done.returncode, done.stdout) == (1, "told\n")
    assert "the change of links at 1 s was not made: `ip -n " in done.stderr


def test_changes_are_recorded_with_the_result() -> None:
    spec = "nodes=2,rate=400mbit,dilation=2,change=50ms:up.2:50mbit+100ms:1:down"
    wait = 'while [ "$(grep -c at_s "$TESTBED_CLUSTER")" -lt 2 ]; do sleep 0.1; done'
    done = testbed("cluster", "--spec", spec, "--", "sh", "-c", f'{wait}; cat "$TESTBED_CLUSTER"')
    assert done.status == 0, done.err
    changes: list[dict[str, Any]] = json.loads(done.out)["record"]["changes"]
    assert [(c["node"], c["direction"], c["kernel_bps"]) for c in changes] == [
        (2, "up", 2.5e7),
        (1, None, 0.0),
    ]


@pytest.mark.slow
def test_a_sweep_in_a_cluster_reproduces_by_its_cells_commands(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    done = testbed(
        "sweep",
        *("--backend", "gloo,zmq-ps", "--workload", f"{FAULTY}:build", "--steps", "8"),
        *("--cluster", "nodes=2,rate=1gbit", "--repeats", "1", "--output", str(folder)),
    )
    assert done.status == 0, done.err
    cells = [json.loads(p.read_text()) for p in (folder / "cells").glob("*.json")]
    assert {c["backend"] for c in cells} == {"gloo", "zmq-ps"}
    assert all(c["cluster"]["nodes"] == c["num_workers"] == 2 for c in cells)
    assert all("--cluster nodes=2,rate=1gbit" in c["command"] for c in cells)
    assert "emulated cluster nodes=2,rate=1gbit" in done.out


@as_root
def test_an_interrupted_sweep_takes_down_the_cluster_of_its_cell(tmp_path: Path) -> None:
    """`mpirun` needs seconds to end its ranks, and the cluster stands until it has."""
    folder, note = tmp_path / "out", tmp_path / "begun"
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f"""
[base]
workload = "{FAULTY}:build:fault=hang,rank=1,at=3,note={note}"
cluster = "nodes=2,rate=1gbit"
backend = "mpi-ring"
steps = 1000
verify_steps = 0
""")
    before = namespaces()
    with subprocess.Popen(
        [sys.executable, "-m", "testbed", "sweep", str(recipe), "--output", str(folder)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as sweep:
        try:
            wait_for(note.exists)
            assert len(namespaces() - before) == 3
            sweep.send_signal(signal.SIGTERM)
            assert sweep.wait(WITHIN_S) == INTERRUPTED
        finally:
            if sweep.poll() is None:
                end_family(sweep.pid)
    assert namespaces() <= before
    assert json.loads((folder / "sweep.json").read_text())["command"].startswith("testbed sweep ")


def test_comm_shows_the_cluster_s_times_and_the_share_of_the_line(tmp_path: Path) -> None:
    record, link = tmp_path / "comm.json", tmp_path / "link.json"
    where = ("--cluster", "nodes=2,rate=1gbit,dilation=4", "--backend", "gloo")
    sizes = ("--min", "256K", "--max", "256K", "--iters", "5")
    done = testbed("comm", *where, *sizes, "--json", str(record))
    assert done.status == 0, done.err
    told = json.loads(record.read_text())
    (result,) = told["results"]
    assert told["dilation"] == 4.0
    share = 8 * result["busbw_bytes_per_s"] / 2.5e8
    assert result["line_rate_share"] == pytest.approx(share)
    row = next(line.split() for line in done.out.splitlines() if line.startswith("  gloo"))
    assert float(row[5]) == pytest.approx(result["time_s"] / 4 * 1e6, abs=0.01)
    assert float(row[-1]) == pytest.approx(share, abs=1e-3)

    done = testbed("comm", "--fit", *where, "--max", "64K", "-o", str(link))
    assert done.status == 0, done.err
    fitted = json.loads(link.read_text())
    assert (fitted["dilation"], fitted["cluster"]["nodes"]) == (4.0, 2)


def test_a_cluster_that_cannot_be_is_refused_by_name() -> None:
    done = answer("run", "--cluster", "nodes=2,rate=fast")
    assert (done.status, "rate is 'fast'" in done.err) == (2, True)
