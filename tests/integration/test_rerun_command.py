"""Stored runs made again by the command, with ranks of their own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.runs import testbed

CELLS = Path(__file__).parents[2] / "runs/compressors/table"


def made(path: Path, *words: str) -> Path:
    done = testbed(
        *("run", "--workload", "digits-mlp", "--steps", "10", "--verify-steps", "0"),
        *("--threads", "1", "--json", str(path), *words),
    )
    assert done.status == 0, done.err
    return path


@pytest.mark.parametrize("words", [("--backend", "gloo"), ("--backend", "zmq-ps")])
def test_a_run_agrees_with_itself(words: tuple[str, ...], tmp_path: Path) -> None:
    record = made(tmp_path / "cell.json", *words)
    again = testbed("rerun", str(record), "--json", str(tmp_path / "again.json"))
    assert again.status == 0, again.out + again.err
    assert "digests and bytes agree" in again.out
    stored, new = (json.loads((tmp_path / n).read_text()) for n in ("cell.json", "again.json"))
    for name in ("sample_digest", "content_digest", "initial_digest", "final_digest"):
        assert stored[name] == new[name] != ""
    assert stored["config"] == new["config"]


@pytest.mark.mpi
def test_a_backend_that_measures_is_opened_as_it_was(tmp_path: Path) -> None:
    """Its bytes and its end are those of the size that it measured, when that is named."""
    record = made(tmp_path / "cell.json", "--backend", "mpi-ring")
    stored = json.loads(record.read_text())
    name, size = stored["opened_as"].split("=")
    assert (name, stored["config"]["backend"]) == ("mpi-ring:switch_bytes", "mpi-ring")
    assert int(size) >= 0
    again = testbed("rerun", str(record))
    assert again.status == 0, again.out + again.err
    assert f"the backend is opened as it was then: mpi-ring:switch_bytes={size}" in again.out
    named = made(tmp_path / "named.json", "--backend", f"mpi-ring:switch_bytes={size}")
    assert json.loads(named.read_text())["opened_as"] == ""
    same = ("final_digest", "wire_bytes_per_step")
    assert [json.loads(named.read_text())[n] for n in same] == [stored[n] for n in same]


def test_a_record_that_was_changed_does_not_agree(tmp_path: Path) -> None:
    record = made(tmp_path / "cell.json", "--backend", "gloo")
    changed = {**json.loads(record.read_text()), "final_digest": "0" * 64}
    record.write_text(json.dumps(changed))
    again = testbed("rerun", str(record))
    assert (again.status, "final parameters DIFFER" in again.out) == (1, True), again.err


def test_a_stored_cell_starts_from_the_same_and_sees_the_same(tmp_path: Path) -> None:
    """Of a committed sweep, out of its archive; the end depends on the processor."""
    file = tmp_path / "table.tar.gz"
    assert testbed("pack", str(CELLS), "-o", str(file)).status == 0
    again = testbed("rerun", f"{file}:39948e860103eedf")
    lines = {line.rpartition("  ")[0][:22].strip(): line for line in again.out.splitlines()}
    for what in ("samples", "initial parameters", "bytes sent a step"):
        assert lines[what].endswith("agree"), again.out
    assert again.status == (1 if "DIFFER" in again.out else 0)


def test_a_workload_that_is_not_there_is_told(tmp_path: Path) -> None:
    record = made(tmp_path / "cell.json", "--backend", "gloo")
    changed = json.loads(record.read_text())
    changed["config"]["workload"] = "gone.py:build"
    record.write_text(json.dumps(changed))
    again = testbed("rerun", str(record))
    assert again.status == 1
    assert "gone.py" in again.err
    assert "Traceback" not in again.err


def test_it_can_be_interrupted(tmp_path: Path) -> None:
    record = made(tmp_path / "cell.json", "--backend", "gloo")
    changed = json.loads(record.read_text())
    changed["config"] |= {"steps": 10_000_000, "verify_steps": 0}
    record.write_text(json.dumps(changed))
    with subprocess.Popen(
        [sys.executable, "-m", "testbed", "rerun", str(record)], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert "running again" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert "interrupted" in process.stderr.read()
