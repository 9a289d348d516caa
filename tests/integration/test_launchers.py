"""The same command line under every launcher, on one machine and on two hosts."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.cluster.access import lacking
from tests.harness.runs import FAULTY, WITHIN_S, testbed

MPIRUN = (str(Path(sys.executable).parent / "mpirun"), "--oversubscribe", "--allow-run-as-root")
MODEL = ("--workload", f"{FAULTY}:build", "--steps", "10", "--warmup", "2", "--verify-steps", "5")


def cell_of(path: Path) -> dict[str, object]:
    cell: dict[str, object] = json.loads(path.read_text())
    assert cell["status"] == "ok"
    assert cell["identical_work"] is True, cell["identical_work_note"]
    return cell


@pytest.mark.mpi
@pytest.mark.parametrize("backend", ["mpi-ring", "mpi", "gloo", "zmq-ps"])
def test_mpirun_by_hand(backend: str, tmp_path: Path) -> None:
    record = tmp_path / "cell.json"
    under = (*MPIRUN, "-n", "4")
    done = testbed("run", *MODEL, "--backend", backend, "--json", str(record), under=under)
    assert done.status == 0, done.err
    assert cell_of(record)["num_workers"] == 4
    assert "joined by openmpi" in done.err


@pytest.mark.parametrize("backend", ["gloo", "zmq-ps"])
def test_torchrun(backend: str, tmp_path: Path) -> None:
    record = tmp_path / "cell.json"
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "testbed", "run", *MODEL, "--backend", backend]
    done = subprocess.run(
        [*command, "--json", str(record)], capture_output=True, text=True, timeout=WITHIN_S
    )
    assert done.returncode == 0, done.stderr
    assert cell_of(record)["num_workers"] == 2


@pytest.mark.mpi
def test_dedicated_servers_take_the_last_ranks(tmp_path: Path) -> None:
    record = tmp_path / "cell.json"
    backend = ("--backend", "zmq-ps:servers=dedicated:1")
    done = testbed("run", *MODEL, *backend, "--json", str(record), under=(*MPIRUN, "-n", "3"))
    assert done.status == 0, done.err
    cell = cell_of(record)
    assert (cell["num_workers"], cell["num_servers"], cell["num_processes"]) == (2, 1, 3)


def test_a_launcher_that_started_too_few_is_told_how_many() -> None:
    environment = {"TESTBED_RANK": "0", "TESTBED_SIZE": "2"}
    command = [sys.executable, "-m", "testbed", "run", "--backend", "gloo", "--workers", "3"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        env={**os.environ, **environment},
    )
    assert done.returncode == 2
    assert "started 2 processes, but the run needs 3 workers" in done.stderr


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
@pytest.mark.slow
def test_a_whole_sweep_inside_one_mpirun(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    axes = ("--backend", "gloo,mpi-ring", "--workload", f"{FAULTY}:build", "--steps", "10")
    done = testbed("sweep", *axes, "--output", str(folder), under=(*MPIRUN, "-n", "4"))
    assert done.status == 0, done.err
    cells = [json.loads(p.read_text()) for p in (folder / "cells").glob("*.json")]
    assert sorted(c["backend"] for c in cells) == ["gloo", "mpi-ring"]
    assert all(c["status"] == "ok" for c in cells)
