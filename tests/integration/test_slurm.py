"""Real Slurm: `testbed` as the tasks of a step, with PMIx and without, and sweeps in a job."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.harness.runs import LATE, MODEL, but_for, cell_of
from tests.harness.slurm import NODE, Slurm

RUN = (sys.executable, "-m", "testbed", "run", *MODEL)


@pytest.mark.parametrize("backend", ["gloo", "zmq-ps"])
def test_srun_without_mpi(backend: str, slurm: Slurm, tmp_path: Path) -> None:
    record = tmp_path / "cell.json"
    step = ("srun", "--mpi=none", "--ntasks=2")
    done = slurm.run(*step, *RUN, "--backend", backend, "--json", str(record))
    assert done.status == 0, done.err
    assert "joined by slurm" in done.err
    assert cell_of(record)["num_workers"] == 2


@pytest.mark.mpi
@pytest.mark.parametrize(
    "backend", ["mpi-ring", "mpi", "gloo", "zmq-ps:servers=dedicated:1", "peer:ddp"]
)
def test_srun_with_pmix(backend: str, slurm: Slurm, tmp_path: Path) -> None:
    slurm.needs_pmix()
    record = tmp_path / "cell.json"
    size = 3 if "dedicated" in backend else 2
    step = ("srun", "--mpi=pmix", f"--ntasks={size}")
    done = slurm.run(*step, *RUN, "--backend", backend, "--json", str(record))
    assert done.status == 0, done.err
    assert "joined by pmix" in done.err
    cell = cell_of(record)
    assert (cell["num_workers"], cell["num_processes"]) == (2, size)


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_join_that_lacks_a_rank_ends_soon_and_names_it(lacking: int, slurm: Slurm) -> None:
    begin_s = time.monotonic()
    step = ("srun", "--mpi=none", "--ntasks=2", "--kill-on-bad-exit=1")
    run = (*RUN, "--backend", "gloo", "--start-deadline", "10")
    done = slurm.run(*step, *but_for(lacking, "SLURM_PROCID"), *run)
    assert done.status != 0
    assert time.monotonic() - begin_s < 15
    assert f"rank {lacking} (host {NODE})" in done.err


@pytest.mark.mpi
def test_a_rank_that_pmix_lacks_is_named(slurm: Slurm) -> None:
    slurm.needs_pmix()
    step = ("srun", "--mpi=pmix", "--ntasks=2", "--kill-on-bad-exit=1")
    done = slurm.run(*step, *but_for(1, "SLURM_PROCID"), *RUN, *LATE)
    assert done.status != 0
    assert f"rank 1 (host {NODE})" in done.err
