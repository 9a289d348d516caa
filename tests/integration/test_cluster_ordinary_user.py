"""Emulated clusters of users who are not root: in a user namespace, or refused with the reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.cluster.system import NETNS_FOLDER, PREFIX
from tests.harness.ordinary_user import PROJECT, REFUSED, as_ordinary_user
from tests.harness.runs import FAULTY, testbed

WITHIN_S = 200.0
ASK = "import os; from testbed.cluster.system import lacking; print(os.geteuid(), lacking() or '')"

pytestmark = pytest.mark.mpi


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def user(home: Path) -> tuple[str, ...]:
    """Words that make an ordinary user run a command; skips where he may not have a cluster."""
    under = as_ordinary_user(home)
    asked = subprocess.run(
        (*under, sys.executable, "-c", ASK), capture_output=True, text=True, timeout=WITHIN_S
    )
    if asked.returncode != 0:
        pytest.skip(f"no ordinary user can run this Python here: {asked.stderr.strip()}")
    uid, _, reason = asked.stdout.strip().partition(" ")
    assert uid != "0"
    if reason:
        pytest.skip(reason)
    return under


def left_behind(home: Path) -> list[str]:
    """Names of ours in the machine's own folder of namespaces, and in the user's for files."""
    namespaces = os.listdir(NETNS_FOLDER) if NETNS_FOLDER.is_dir() else []
    return [*(n for n in namespaces if n.startswith(PREFIX)), *map(str, home.glob(f"{PREFIX}*"))]


def test_the_nodes_are_hosts_of_their_own(user: tuple[str, ...], home: Path) -> None:
    before = left_behind(home)
    command = ("cluster", "--nodes", "2", "--", "mpirun", "-n", "2", "hostname")
    done = testbed(*command, within_s=WITHIN_S, under=user)
    assert done.status == 0, done.err
    assert sorted(done.out.split()) == ["node1", "node2"]
    assert set(left_behind(home)) <= set(before)


@pytest.mark.parametrize(
    "backend", ["mpi-ring", *(pytest.param(b, marks=pytest.mark.slow) for b in ("gloo", "zmq-ps"))]
)
def test_a_run_under_his_own_mpirun(backend: str, user: tuple[str, ...], home: Path) -> None:
    record = home / "cell.json"
    done = testbed(
        *("cluster", "--nodes", "2", "--rate", "1gbit", "--", "mpirun", "-n", "2"),
        *(sys.executable, "-m", "testbed", "run", "--backend", backend, "--deadline", "60"),
        *("--workload", f"{FAULTY}:build", "--steps", "8", "--warmup", "2"),
        *("--verify-steps", "5", "--json", str(record)),
        within_s=WITHIN_S,
        under=user,
    )
    assert done.status == 0, done.err
    cell = json.loads(record.read_text())
    assert cell["identical_work"] is True, cell["identical_work_note"]
    assert (cell["num_workers"], cell["num_machines"]) == (2, 2)
    assert cell["cluster"]["links"][1]["kernel_down_bps"] == 1e9


@pytest.mark.slow
def test_a_run_that_starts_its_own_cluster(user: tuple[str, ...], home: Path) -> None:
    record = home / "cell.json"
    done = testbed(
        *(
            "run",
            "--cluster",
            "nodes=2,rate=1gbit,latency=1ms,latency_by=injected",
            "--backend",
            "gloo",
        ),
        *("--workload", f"{FAULTY}:build", "--steps", "8", "--warmup", "2", "--deadline", "60"),
        *("--verify-steps", "5", "--json", str(record)),
        within_s=WITHIN_S,
        under=user,
    )
    assert done.status == 0, done.err
    cell = json.loads(record.read_text())
    assert (cell["identical_work"], cell["num_machines"]) == (True, 2)


@pytest.mark.parametrize(
    "command",
    [("cluster", "--nodes", "2", "--", "hostname"), ("run", "--cluster", "nodes=2,rate=1gbit")],
    ids=["cluster", "run"],
)
def test_where_the_kernel_refuses_the_error_says_why_and_what_helps(
    command: tuple[str, ...],
) -> None:
    tried = subprocess.run((*REFUSED, "id", "-u"), capture_output=True, text=True)
    if tried.returncode != 0:
        pytest.skip(f"no user namespaces at all: {tried.stderr.strip()}")
    assert tried.stdout == "65534\n"
    done = testbed(*command, within_s=WITHIN_S, under=REFUSED)
    assert (done.status, done.out) == (1, "")
    (line,) = done.err.splitlines()
    assert "'cluster' is unavailable: network namespaces are not allowed here (unshare: " in line
    assert "run as root, or let users make namespaces (sysctl user.max_user_namespaces" in line


NOT_EMULATED = """
import sys
from pathlib import Path
import msgspec
from testbed.studies.published.emulate import emulate
from testbed.studies.published.shapes import published_shapes
from testbed.studies.published.lines import Comparison

lines = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Comparison).lines
measured = emulate(Path(sys.argv[2]), published_shapes(), lines)
print(measured.status, measured.files["paper-shapes-emulated.md"])
"""


def test_where_the_kernel_refuses_published_shapes_are_not_emulated_and_say_why(
    tmp_path: Path,
) -> None:
    if subprocess.run((*REFUSED, "true"), capture_output=True).returncode != 0:
        pytest.skip("no user namespaces at all")
    simulated = PROJECT / "runs" / "published" / "paper-shapes.json"
    command = (*REFUSED, sys.executable, "-c", NOT_EMULATED, str(simulated), str(tmp_path))
    done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S, cwd=PROJECT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("0 # Published shapes in emulation")
    assert "0 of 0 emulated inequalities hold" in done.stdout
    assert "7 could not be emulated here." in done.stdout
    assert "(1) not emulated: emulated 'cluster' is unavailable: network namespaces are not" in (
        done.stdout
    )
    assert not list(tmp_path.iterdir())
