"""Whatever happens to a rank, the run ends soon, says who, what and where, and leaves nothing."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from tests.harness.runs import FAULTY, testbed

DEADLINE_S = "6"
NETWORKED = ["zmq-ps", "mpi-ring", "mpi", "gloo"]
FAULTS = ["kill", "raise", "stop", "hang"]
# One fault of each kind on each backend would take minutes: the default suite holds every backend
# and every fault once, `pytest -m slow` all pairs.
QUICK = {("zmq-ps", "kill"), ("mpi-ring", "raise"), ("mpi", "stop"), ("gloo", "hang")}
PAIRS = [
    pytest.param(b, f, marks=[] if (b, f) in QUICK else [pytest.mark.slow])
    for b in NETWORKED
    for f in FAULTS
]


@pytest.mark.parametrize(("backend", "fault"), PAIRS)
def test_a_fault_on_one_rank_ends_the_run(backend: str, fault: str, tmp_path: Path) -> None:
    record = tmp_path / "cell.json"
    done = testbed(
        "run",
        *("--workload", f"{FAULTY}:build:fault={fault},rank=1,at=3"),
        *("--backend", backend, "--workers", "2", "--steps", "20", "--verify-steps", "0"),
        *("--deadline", DEADLINE_S, "--json", str(record)),
    )
    assert done.status == 1, done.err
    assert "rank 1" in done.err
    if fault == "raise":
        assert "the model is broken on purpose" in done.err
    if fault in ("stop", "hang"):
        assert "step 3" in done.err
        assert "exchange of" in done.err or "sum of" in done.err
    assert json.loads(record.read_text())["status"] == "failed"
    assert not leftovers(str(record))


def test_nan_names_tensor_and_step() -> None:
    done = testbed(
        *("run", "--workload", f"{FAULTY}:build:fault=nan,rank=0,at=2", "--backend", "gloo"),
        *("--workers", "2", "--steps", "20", "--verify-steps", "0", "--deadline", DEADLINE_S),
    )
    assert done.status == 1
    assert "NonFiniteGradient" in done.err
    assert "0.weight" in done.err
    assert "step 2" in done.err


def leftovers(word: str) -> list[str]:
    """Processes whose command line still holds a word that only this test's run had."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        if word in line and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(line)
    return found
