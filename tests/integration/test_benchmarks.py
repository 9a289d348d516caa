"""The benchmarks under `mpirun`: every pytest is a rank, and one of them writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MPIRUN = str(Path(sys.executable).parent / "mpirun")
PYTEST = (sys.executable, "-m", "mpi4py", "-m", "pytest", "tests/benchmarks")


@pytest.mark.mpi
def test_rank_0_alone_writes_and_prints(tmp_path: Path) -> None:
    whole, saved = tmp_path / "all.json", tmp_path / "saved"
    wanted = ("-m", "smoke", "--benchmark-only", "-k", "gloo and barrier or mpi-ring and gather")
    writes = (f"--benchmark-json={whole}", f"--benchmark-storage={saved}", "--benchmark-autosave")
    started = (MPIRUN, "--oversubscribe", "--allow-run-as-root", "-n", "2", *PYTEST)
    done = subprocess.run(
        (*started, *wanted, *writes, "--color=no"),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("2 passed") == done.stdout.count("test session starts") == 1
    assert done.stderr.count("Wrote benchmark data") == 1
    assert len(list(saved.rglob("*.json"))) == 1
    barrier, gather = sorted(json.loads(whole.read_text())["benchmarks"], key=lambda b: b["group"])[
        ::-1
    ]
    assert barrier["group"] == "barrier, 2 ranks, 0 bytes"
    assert gather["group"] == "all-gather, 2 ranks, 262144 bytes"
    for each in (barrier, gather):
        samples_s, extra = each["stats"]["data"], each["extra_info"]
        assert len(samples_s) == each["stats"]["rounds"] == 60
        assert 0 < extra["cross_rank_min_s"] <= max(samples_s)
        assert extra["ranks"] == 2
    extra = gather["extra_info"]
    assert extra["busbw_bytes_per_s"] == pytest.approx(extra["algbw_bytes_per_s"] / 2)
    assert extra["configuration"]["backend"] == "mpi-ring"
