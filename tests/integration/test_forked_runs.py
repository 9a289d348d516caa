"""Forked ranks do what freshly started ones do, and a record says which they were."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from testbed.forking import KEEPER, SERVER
from testbed.records.cell import Cell, decode_cell
from tests.harness.family import belongs, descendants
from tests.harness.runs import FAULTY, end_family, testbed

# Everything else in a record is to be equal.
TIMES = {
    *("step_time_s", "step_time_p5_s", "step_time_p95_s", "step_time_unfiltered_s"),
    *("samples_per_s", "compute_s", "exposed_comm_s", "training_time_s"),
    *("time_to_accuracy_s", "time_to_loss_s"),
    *("cores_busy", "cores_stolen", "cores_outside", "peak_memory_bytes", "accuracy_curve"),
}
TIMES_OF_SAMPLES = {
    *("step_time_s", "compute_s", "exposed_comm_s", "exposed_comm_by_rank_s"),
    *("cores_stolen", "cores_outside", "unsteady"),
}


def run(record: Path, *more: str, **variables: str) -> Cell:
    done = testbed(
        *("run", "--workload", f"{FAULTY}:build", "--workers", "2", "--steps", "12"),
        *("--seed", "3", "--json", str(record), *more),
        **variables,
    )
    assert done.status == 0, done.err
    return decode_cell(record.read_bytes())


def facts(cell: Cell) -> dict[str, Any]:
    """What a record tells apart from times, memory and how its processes were started."""
    found = {k: v for k, v in msgspec.to_builtins(cell).items() if k not in TIMES}
    found["samples"] = {k: v for k, v in found["samples"].items() if k not in TIMES_OF_SAMPLES}
    for name in ("started", "began", "commit"):  # the tree may be worked on meanwhile
        del found["environment"][name]
    found["environment"]["variables"].pop("OMPI_MCA_btl_sm_backing_directory", None)  # of each run
    return found


@pytest.mark.parametrize(
    "backend",
    [pytest.param("mpi-ring:switch_bytes=64K", marks=pytest.mark.mpi), "gloo", "zmq-ps"],
)
def test_records_of_forked_and_fresh_ranks_are_equal(backend: str, tmp_path: Path) -> None:
    forked = run(tmp_path / "forked.json", "--backend", backend)
    fresh = run(tmp_path / "fresh.json", "--backend", backend, **{SERVER: "none"})
    assert forked.environment["started"] == "forked"
    assert fresh.environment["started"] == "fresh"
    assert forked.identical_work
    assert facts(forked) == facts(fresh)
    assert len(forked.samples.loss) == 12


def test_a_run_opens_a_server_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SERVER)
    cell = run(tmp_path / "cell.json", "--backend", "gloo")
    assert cell.environment["started"] == "forked"


def test_forked_ranks_compute_with_several_threads(tmp_path: Path) -> None:
    if os.cpu_count() == 1:
        pytest.skip("this machine has one core")
    digits = ("--workload", "digits-cnn", "--threads", "2", "--backend", "gloo")
    cell = run(tmp_path / "cell.json", *digits)
    assert cell.environment["started"] == "forked"
    assert cell.environment["torch_threads"] == 2


@contextlib.contextmanager
def hanging(tmp_path: Path, *command: str) -> Iterator[subprocess.Popen[str]]:
    """A command whose rank 1 has begun to train, and hangs."""
    note = tmp_path / "note"
    workload = f"{FAULTY}:build:fault=hang,rank=1,at=3,note={note}"
    words = [sys.executable, "-m", "testbed", *command, "--workload", workload]
    with subprocess.Popen([*words, "--workers", "2"], stderr=subprocess.PIPE, text=True) as process:
        try:
            while not note.exists():
                assert process.poll() is None
                time.sleep(0.05)
            yield process
        except BaseException:
            end_family(process.pid)
            raise


@pytest.mark.parametrize(
    "command",
    [
        ("run", "--backend", "zmq-ps", "--deadline", "60"),
        pytest.param(("run", "--backend", "mpi", "--deadline", "60"), marks=pytest.mark.mpi),
        ("sweep", "--backend", "gloo", "--repeats", "1", "--output"),
    ],
    ids=["run", "run-mpi", "sweep"],
)
def test_nothing_that_was_forked_outlives_a_killed_command(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SERVER)  # it has a server of its own
    folder = [str(tmp_path / "sweep")] if command[-1] == "--output" else []
    with hanging(tmp_path, *command, *folder) as process:
        family = psutil.Process(process.pid).children(recursive=True)
        assert [p for p in family if KEEPER in p.cmdline()]
        process.kill()
    assert psutil.wait_procs(family, 20)[1] == []


@pytest.mark.mpi
def test_mpirun_ends_the_job_of_a_killed_stub(tmp_path: Path) -> None:
    with hanging(tmp_path, "run", "--backend", "mpi-ring", "--deadline", "20") as process:
        (stub,) = (
            p
            for p in psutil.Process(process.pid).children(recursive=True)
            if p.environ().get("OMPI_COMM_WORLD_RANK") == "1"
        )
        forked = [
            psutil.Process(pid) for pid in descendants() if belongs(pid, frozenset({stub.pid}))
        ]
        assert len(forked) == 3  # stub, keeper and rank
        stub.kill()
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "rank 1 (host" in said
    assert psutil.wait_procs(forked, 20)[1] == []
