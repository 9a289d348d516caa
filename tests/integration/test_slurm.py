"""Real Slurm: `testbed` as the tasks of a step, with PMIx and without, and sweeps in jobs."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from testbed.records.store import Store
from tests.harness.runs import (
    FAULTY,
    LATE,
    MODEL,
    ROOT,
    assert_of_ranks,
    but_for,
    cell_of,
    forkable,
)
from tests.harness.slurm import NODE, Slurm, until

RUN = (sys.executable, "-m", "testbed", "run", *MODEL)


def test_srun_without_mpi(slurm: Slurm, tmp_path: Path) -> None:
    """Of gloo, with a plan of memory that the ranks compare; of zmq-ps it is in the example."""
    record = tmp_path / "cell.json"
    step = ("srun", "--mpi=none", "--ntasks=2")
    memory = ("--memory", "laysa", "--compressor", "ef:units=update+topk:ratio=0.1")
    files = ("--json", str(record), "--timeline", str(tmp_path / "t.json"))
    done = slurm.run(*step, *RUN, "--backend", "gloo", *memory, *files)
    assert done.status == 0, done.err
    assert "joined by slurm" in done.err
    cell = cell_of(record)
    assert cell["num_workers"] == 2
    assert cell["environment"]["started"] == "fresh"
    assert "layers or blocks" in cell["memory"]["why"]
    assert_of_ranks(2, tmp_path / "t.json")


@pytest.mark.parametrize("num_tasks", [1, 2])
def test_a_task_starts_a_step_within_its_own(num_tasks: int, slurm: Slurm) -> None:
    """As Open MPI's mpirun does for the hosts of a cell, of a job whose step has all processors."""
    program = """
import os, subprocess
from testbed.launch.processes import base_environment
if os.environ["SLURM_PROCID"] == "0":
    within = ("srun", "--mpi=none", "--ntasks=1", "printenv", "SLURM_STEP_ID")
    subprocess.run(within, env=base_environment(), check=True, timeout=30)
"""
    step = ("srun", "--mpi=none", f"--ntasks={num_tasks}", "--kill-on-bad-exit=1")
    done = slurm.run(*step, sys.executable, "-c", program)
    assert done.status == 0, done.err
    assert done.out.strip() == "1"


@pytest.mark.mpi
@pytest.mark.parametrize(
    "backend", ["mpi-ring", "mpi", "gloo", "zmq-ps:servers=dedicated:1", "peer:ddp"]
)
def test_srun_with_pmix(backend: str, slurm: Slurm, tmp_path: Path) -> None:
    slurm.needs_pmix()
    record = tmp_path / "cell.json"
    size = 3 if "dedicated" in backend else 2
    step = ("srun", "--mpi=pmix", f"--ntasks={size}")
    files = ("--json", str(record), "--timeline", str(tmp_path / "t.json"))
    done = slurm.run(*step, *RUN, "--backend", backend, *files)
    assert done.status == 0, done.err
    assert "joined by pmix" in done.err
    cell = cell_of(record)
    assert cell["environment"]["started"] == "fresh"
    assert (cell["num_workers"], cell["num_processes"]) == (2, size)
    assert_of_ranks(2, tmp_path / "t.json")


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_join_that_lacks_a_rank_ends_soon_and_names_it(lacking: int, slurm: Slurm) -> None:
    deadline_s = 10 if lacking == 0 else 3
    begin_s = time.monotonic()
    step = ("srun", "--mpi=none", "--ntasks=2", "--kill-on-bad-exit=1")
    run = forkable((*RUN, "--backend", "gloo", "--start-deadline", str(deadline_s)))
    done = slurm.run(*step, *but_for(lacking, "SLURM_PROCID"), *run)
    assert done.status != 0
    assert time.monotonic() - begin_s < deadline_s + 5
    assert f"rank {lacking} (host {NODE})" in done.err


@pytest.mark.mpi
def test_a_rank_that_pmix_lacks_is_named(slurm: Slurm) -> None:
    slurm.needs_pmix()
    step = ("srun", "--mpi=pmix", "--ntasks=2", "--kill-on-bad-exit=1")
    done = slurm.run(*step, *but_for(1, "SLURM_PROCID"), *forkable((*RUN, *LATE)))
    assert done.status != 0
    assert f"rank 1 (host {NODE})" in done.err


@pytest.mark.mpi
@pytest.mark.timeout(300)
def test_the_example_of_a_job(slurm: Slurm, tmp_path: Path) -> None:
    """zmq-ps by srun without MPI, then a sweep inside the allocation."""
    example = (str(ROOT / "examples" / "slurm.sbatch"), "--workload", f"{FAULTY}:build")
    job = (f"--chdir={tmp_path}", "--output=job.log", *example, "--steps", "10")
    status = slurm.batch(*job, within_s=280)
    said = (tmp_path / "job.log").read_text()
    assert status == "0:0", said
    assert "joined by slurm" in said
    cell = cell_of(tmp_path / "cell.json")
    assert (cell["backend"], cell["environment"]["started"]) == ("zmq-ps", "fresh")
    cells = [cell_of(path) for path in (tmp_path / "results" / "cells").glob("*.json")]
    assert sorted(cell["backend"] for cell in cells) == ["gloo", "mpi-ring"]


@pytest.mark.timeout(300)
def test_an_array_of_6_cells_in_2_tasks_one_killed_and_resumed_ends_whole(
    slurm: Slurm, tmp_path: Path
) -> None:
    folder = tmp_path / "results"
    axes = ("--backend", "none", "--workers", "1", "--seed", "1,2,3,4,5,6", "--repeats", "1")
    axes += ("--workload", f"{FAULTY}:build", "--steps", "8", "--output", str(folder))
    submit = ("--submit", "slurm", "--tasks", "2", "--go")
    done = slurm.run(sys.executable, "-m", "testbed", "sweep", *axes, *submit)
    assert done.status == 0, done.err
    job = done.out.split()[-1]
    store = Store(folder)
    shares = [dict(store.read_plan().runs(share)) for share in (0, 1)]
    second = folder / "task-1.log"
    until(lambda: second.exists() and "[2/3]" in second.read_text(), "second cell", within_s=100)
    assert slurm.run("scancel", "--signal=KILL", "--full", f"{job}_1").status == 0
    slurm.ends(within_s=100)
    assert shares[0].keys() <= store.finished()
    assert len(kept := store.finished() & shares[1].keys()) < 3
    before = {key: (store.cells / f"{key}.json").stat().st_mtime_ns for key in store.finished()}

    assert slurm.batch("--array=1", str(folder / "array.sbatch")) == "0:0", second.read_text()
    assert store.finished() == shares[0].keys() | shares[1].keys()
    assert (
        before.items()
        <= {
            key: (store.cells / f"{key}.json").stat().st_mtime_ns for key in store.finished()
        }.items()
    ), "a finished cell was run again"
    assert f"{len(kept)} of 3 runs are there already" in second.read_text()
    assert (folder / "task-0.log").read_text().count(": ok in ") == 3
    assert second.read_text().count(": ok in ") == 3
