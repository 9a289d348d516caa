"""Starting the real `testbed` command from tests, under a deadline, leaving nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from testbed.forking import through_stub

HARNESS = Path(__file__).parent
ROOT = HARNESS.parent.parent
FAULTY = HARNESS / "faulty_model.py"
WITHIN_S = 100.0
MODEL = ("--workload", f"{FAULTY}:build", "--steps", "10", "--warmup", "2", "--verify-steps", "5")
LATE = ("--backend", "gloo", "--start-deadline", "3")  # of a run that some rank does not join


@dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    status: int
    out: str
    err: str


def testbed(*arguments: str, within_s: float = WITHIN_S, under: tuple[str, ...] = ()) -> Finished:
    """Run `testbed ...` (under a launcher if given) and wait for it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    command = [sys.executable, "-m", "testbed", *arguments]
    if under:
        command = [*under, *command]
    else:
        command = through_stub(command, environment, ["testbed.cli", "testbed.workloads.load"])
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            out, err = process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            end_family(process.pid)
            out, err = process.communicate()
            raise AssertionError(f"{command} did not end in {within_s} s\n{out}\n{err}") from None
    return Finished(process.returncode, out, err)


def cell_of(path: Path) -> dict[str, Any]:
    cell: dict[str, Any] = json.loads(path.read_text())
    assert cell["status"] == "ok"
    assert cell["identical_work"] is True, cell["identical_work_note"]
    return cell


def but_for(rank: int, variable: str) -> tuple[str, ...]:
    """What a launcher starts before a command that all ranks but one shall run."""
    return ("sh", "-c", f'[ "${variable}" = {rank} ] && exec sleep 100; exec "$@"', "sh")


def end_family(pid: int) -> None:
    parent = psutil.Process(pid)
    for process in [*parent.children(recursive=True), parent]:
        process.kill()


testbed.__test__ = False  # type: ignore[attr-defined]
