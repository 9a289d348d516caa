"""The same command line under every launcher, on one machine and on two hosts."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from testbed.cluster.system import lacking
from tests.harness.runs import (
    FAULTY,
    LATE,
    MODEL,
    ROOT,
    WITHIN_S,
    answer,
    assert_of_ranks,
    but_for,
    cell_of,
    testbed,
)
from tests.harness.slurm import absent

BESIDE = Path(sys.executable).parent
MPIRUN = (str(BESIDE / "mpirun"), "--oversubscribe", "--allow-run-as-root")
TORCHRUN = (str(BESIDE / "torchrun"), "--nproc-per-node", "2")
MPICH = ROOT / ".mpich" / "bin" / "mpirun"  # a folder of its own: it must not stand in for Open MPI


@pytest.mark.mpi
@pytest.mark.parametrize("backend", ["mpi-ring", "mpi", "gloo", "zmq-ps"])
def test_mpirun_by_hand(backend: str, tmp_path: Path) -> None:
    record = tmp_path / "cell.json"
    size = 4 if backend == "mpi-ring" else 2
    files = ("--json", str(record), "--timeline", str(tmp_path / "t.json"))
    run = ("run", *MODEL, "--backend", backend, *files)
    done = testbed(*run, under=(*MPIRUN, "-n", str(size)))
    assert done.status == 0, done.err
    cell = cell_of(record)
    assert cell["num_workers"] == size
    assert cell["environment"]["started"] == "fresh"
    assert "joined by openmpi" in done.err
    variables = cell["environment"]["variables"]
    assert variables["OMPI_MCA_initial_wdir"] == "."  # mpirun sets it to the absolute path
    assert not [value for value in variables.values() if value.startswith("/")]
    assert_of_ranks(size, tmp_path / "t.json")


@pytest.mark.mpi
def test_only_the_first_rank_has_to_be_able_to_write(tmp_path: Path) -> None:
    """Other ranks may be on hosts that do not have the folder."""
    record = tmp_path / "cell.json"
    run = (sys.executable, "-m", "testbed", "run", *MODEL, "--backend", "gloo", "--json")
    other = str(tmp_path / "not there" / "cell.json")
    both = ("-n", "1", *run, str(record), ":", "-n", "1", *run, other)
    done = subprocess.run([*MPIRUN, *both], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert cell_of(record)["num_workers"] == 2


@pytest.mark.parametrize(
    ("backend", "variables"),
    [("gloo", {}), ("zmq-ps", {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})],
    ids=["gloo, agent's store", "zmq-ps, rank 0's store"],
)
def test_torchrun(backend: str, variables: dict[str, str], tmp_path: Path) -> None:
    record = tmp_path / "cell.json"
    command = [*TORCHRUN, "-m", "testbed", "run", *MODEL, "--backend", backend]
    done = subprocess.run(
        [*command, "--json", str(record), "--timeline", str(tmp_path / "t.json")],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
    )
    assert done.returncode == 0, done.stderr
    assert_of_ranks(2, tmp_path / "t.json")
    cell = cell_of(record)
    assert cell["num_workers"] == 2
    assert cell["environment"]["started"] == "fresh"


@pytest.mark.mpi
@pytest.mark.parametrize("backend", ["mpi-ring", "gloo"])
def test_mpirun_of_mpich(backend: str, mpich: str, tmp_path: Path) -> None:
    record = tmp_path / "cell.json"
    run = ("run", *MODEL, "--backend", backend, "--json", str(record))
    done = testbed(*run, under=(mpich, "-n", "2"))
    assert done.status == 0, done.err
    cell = cell_of(record)
    assert cell["num_workers"] == 2
    assert cell["environment"]["started"] == "fresh"
    assert "joined by pmi" in done.err


@pytest.mark.mpi
def test_a_killed_rank_of_mpich_leaves_no_shared_memory(mpich: str) -> None:
    before = set(Path("/dev/shm").glob("mpich_shm_*"))
    model = ("--workload", f"{FAULTY}:build:fault=kill,rank=1,at=3", "--verify-steps", "0")
    run = ("run", *model, "--backend", "mpi-ring", "--steps", "20", "--deadline", "4")
    done = testbed(*run, under=(mpich, "-n", "2"), fresh=False)
    assert done.status != 0
    assert "joined by pmi" in done.err
    assert set(Path("/dev/shm").glob("mpich_shm_*")) <= before


@pytest.mark.mpi
def test_a_site_s_mpich_starts_the_ranks_of_a_run(
    mpich: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{Path(mpich).parent}{os.pathsep}{os.environ['PATH']}")
    record = tmp_path / "cell.json"
    done = testbed("run", *MODEL, "--backend", "mpi-ring", "--json", str(record))
    assert done.status == 0, done.err
    variables = cell_of(record)["environment"]["launcher_variables"]
    assert "PMI_RANK" in variables


@pytest.fixture
def mpich() -> str:
    """The `mpirun` of MPICH."""
    if not MPICH.exists():
        absent(f"MPICH is not in {MPICH.parent.parent}: python3 -m venv, then pip install mpich")
    return str(MPICH)


@pytest.mark.mpi
@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_ranks_stay_here_in_a_job_of_several_nodes(
    mpi: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Left alone, mpirun starts them on the nodes that Slurm's variables name."""
    path = os.environ["PATH"]
    if mpi == "mpich":
        path = f"{Path(request.getfixturevalue('mpich')).parent}{os.pathsep}{path}"
    assert _ranks_in_a_job(tmp_path / "cell.json", PATH=path)["num_workers"] == 2


@pytest.mark.mpi
@pytest.mark.skipif(lacking() is not None, reason=str(lacking()))
def test_so_do_those_of_an_emulated_cluster(tmp_path: Path) -> None:
    assert _ranks_in_a_job(tmp_path / "cell.json", "--cluster", "nodes=2")["cluster"]


def _ranks_in_a_job(record: Path, *more: str, **variables: str) -> dict[str, Any]:
    """The cell of two ranks, started in the shell of a job of two nodes that do not exist."""
    job = {"SLURM_JOBID": "7", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NNODES": "2"}
    nodes = {"SLURM_JOB_NODELIST": "absent[1-2]", "SLURM_NODELIST": "absent[1-2]"}
    counts = {"SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_JOB_CPUS_PER_NODE": "1(x2)"}
    run = ("run", *MODEL, "--backend", "mpi-ring", "--workers", "2", "--json", str(record))
    done = testbed(*run, *more, **job, **nodes, **counts, **variables)
    assert done.status == 0, done.err
    return cell_of(record)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("launcher", "variable"),
    [
        pytest.param((*MPIRUN, "-n", "2"), "OMPI_COMM_WORLD_RANK", id="openmpi"),
        pytest.param(("mpich", "-n", "2"), "PMI_RANK", id="mpich"),
        pytest.param((*TORCHRUN, "--no-python"), "RANK", id="torchrun"),
    ],
)
def test_a_rank_that_does_not_come_is_named(
    launcher: tuple[str, ...], variable: str, request: pytest.FixtureRequest
) -> None:
    if launcher[0] == "mpich":
        launcher = (request.getfixturevalue("mpich"), *launcher[1:])
    done = testbed("run", *LATE, under=(*launcher, *but_for(1, variable)), fresh=False)
    assert done.status != 0
    assert f"rank 1 (host {socket.gethostname()})" in done.err
    assert "--start-deadline" in done.err


@pytest.mark.mpi
def test_a_rank_whose_host_lacks_the_network_tells_the_others() -> None:
    run = ("run", *MODEL, "--backend", "gloo", "--interface")
    first = (*MPIRUN, "-n", "1", sys.executable, "-m", "testbed", *run, "lo", ":", "-n", "1")
    done = testbed(*run, "wrong0", under=first)
    assert done.status != 0
    why = "no interface 'wrong0' on this machine"
    assert f"UsageError: rank 1 (host {socket.gethostname()}): {why}" in done.err
    assert f"is lost: it failed while joining with UsageError: {why}" in done.err


def test_the_record_of_ranks_that_refuse_their_input_says_why(tmp_path: Path) -> None:
    record = tmp_path / "cell.json"
    run = ("run", *MODEL, "--backend", "gloo", "--interface", "wrong0", "--json", str(record))
    assert testbed(*run).status == 2
    assert "no interface 'wrong0' on this machine" in record.read_text()


@pytest.mark.parametrize(("own", "absent_rank"), [(0, 1), (1, 0)])
def test_a_rank_that_testbed_lacks_is_named(
    own: int, absent_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    variables = {"RANK": own, "SIZE": 2, "HUB": f"127.0.0.1:{port}", "TOKEN": "ab" * 16}
    for name, value in variables.items():
        monkeypatch.setenv(f"TESTBED_{name}", str(value))
    done = testbed("run", *LATE)
    assert done.status == 1
    assert f"rank {absent_rank} (host {socket.gethostname()})" in done.err


@pytest.mark.mpi
def test_dedicated_servers_take_the_last_ranks(tmp_path: Path) -> None:
    record = tmp_path / "cell.json"
    backend = ("--backend", "zmq-ps:servers=dedicated:1")
    run = ("run", *MODEL, *backend, "--json", str(record))
    done = testbed(*run, under=(*MPIRUN, "-n", "3"), fresh=False)
    assert done.status == 0, done.err
    cell = cell_of(record)
    assert (cell["num_workers"], cell["num_servers"], cell["num_processes"]) == (2, 1, 3)


def test_a_launcher_that_started_too_few_is_told_how_many() -> None:
    launched = {"TESTBED_RANK": "0", "TESTBED_SIZE": "2"}
    done = answer("run", "--backend", "gloo", "--workers", "3", **launched)
    assert done.status == 2
    assert "started 2 processes, but the run needs 3 workers" in done.err


@pytest.mark.mpi
@pytest.mark.skipif(lacking() is not None, reason=str(lacking()))
@pytest.mark.parametrize(
    "backend",
    ["mpi-ring", *(pytest.param(b, marks=pytest.mark.slow) for b in ("mpi", "gloo", "zmq-ps"))],
)
def test_two_hosts_by_hostfile(backend: str, tmp_path: Path) -> None:
    record = tmp_path / "cell.json"
    run = (sys.executable, "-m", "testbed", "run", *MODEL, "--backend", backend)
    words = shlex.join([*run, "--json", str(record)])
    # Two hosts on a network, and nobody is told that it is emulated.
    script = f'unset TESTBED_CLUSTER; {words} --hostfile "$PRTE_MCA_prte_default_hostfile"'
    done = testbed("cluster", "--nodes", "2", "--", "sh", "-c", script)
    assert done.status == 0, done.err
    cell = cell_of(record)
    assert (cell["num_machines"], cell["cluster"]) == (2, None)


@pytest.mark.mpi
def test_a_sweep_that_mpirun_started_once_starts_jobs_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    axes = ("--backend", "gloo", "--workload", f"{FAULTY}:build", "--steps", "5", "--workers", "2")
    done = testbed("sweep", *axes, "--output", str(folder), under=(*MPIRUN, "-n", "1"))
    assert done.status == 0, done.err
    cells = [json.loads(p.read_text()) for p in (folder / "cells").glob("*.json")]
    assert {(cell["status"], cell["num_workers"]) for cell in cells} == {("ok", 2)}


@pytest.mark.mpi
@pytest.mark.slow
def test_a_whole_sweep_inside_one_mpirun(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    axes = ("--backend", "gloo,mpi-ring", "--workload", f"{FAULTY}:build", "--steps", "10")
    done = testbed("sweep", *axes, "--output", str(folder), under=(*MPIRUN, "-n", "4"))
    assert done.status == 0, done.err
    cells = [json.loads(p.read_text()) for p in (folder / "cells").glob("*.json")]
    assert sorted(c["backend"] for c in cells) == ["gloo", "mpi-ring"]
    assert all(c["status"] == "ok" for c in cells)
