"""Starting the real `testbed` command from tests, under a deadline, leaving nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

HARNESS = Path(__file__).parent
FAULTY = HARNESS / "faulty_model.py"
WITHIN_S = 100.0


@dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    status: int
    out: str
    err: str


def testbed(*arguments: str, within_s: float = WITHIN_S, under: tuple[str, ...] = ()) -> Finished:
    """Run `testbed ...` (under a launcher if given) and wait for it."""
    command = [*under, sys.executable, "-m", "testbed", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
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


def end_family(pid: int) -> None:
    parent = psutil.Process(pid)
    for process in [*parent.children(recursive=True), parent]:
        process.kill()


testbed.__test__ = False  # type: ignore[attr-defined]
