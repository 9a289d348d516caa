"""Starting the real `testbed` command from tests, under a deadline, leaving nothing behind.

`testbed` starts a process. `answer` calls the command line in this one: for what is refused, listed
or only told, where nothing is started. `tests/integration/test_verbs.py` starts each verb once.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest

from testbed.cli import main
from testbed.commands.run import RANK_MODULES
from testbed.forking import through_stub
from testbed.records.timeline import decode_timeline

HARNESS = Path(__file__).parent
ROOT = HARNESS.parent.parent
FAULTY = HARNESS / "faulty_model.py"
WITHIN_S = 100.0
MODEL = ("--workload", f"{FAULTY}:build", "--steps", "10", "--warmup", "2", "--verify-steps", "5")
MODULES = (*RANK_MODULES, "sklearn.datasets")  # of commands, and of ranks that a launcher starts
OF_LAUNCHERS = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TMPDIR")
LATE = ("--backend", "gloo", "--start-deadline", "2")  # of a run that some rank does not join


@dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    status: int
    out: str
    err: str


def forkable(command: Sequence[str]) -> list[str]:
    """A command of this Python, forked from the session's server: some seconds less of a core.

    Testbed itself starts ranks afresh under a launcher that it did not start. So does each launcher
    in tests, once with each backend; in tests of something else it starts stubs of forked ranks.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # Set by torchrun, for NCCL alone, and by Slurm, to /tmp: a server of their own would be needed.
    unset = [f"--unset={name}" for name in OF_LAUNCHERS if name not in os.environ]
    return ["env", *unset, *through_stub(command, environment, MODULES)]


def testbed(
    *arguments: str,
    within_s: float = WITHIN_S,
    under: tuple[str, ...] = (),
    fresh: bool = True,
    **variables: str,
) -> Finished:
    """Run `testbed ...` and wait for it.

    Args:
        arguments: as a user writes them.
        within_s: it is ended after that, and the test fails.
        under: the launcher's words.
        fresh: what a launcher starts is a new Python; else it is forked, see `forkable`.
        variables: of the command's environment.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120", **variables}
    command = [sys.executable, "-m", "testbed", *arguments]
    if not under or not fresh:
        command = forkable(command)
    command = [*under, *command]
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


def assert_of_ranks(size: int, path: Path) -> None:
    """All ranks have recorded all measured steps, on clocks that were compared."""
    timeline = decode_timeline(path.read_bytes(), str(path))
    steps = {e.step for e in timeline.events}
    assert steps == set(timeline.exposed_s)
    done = {(e.rank, e.step) for e in timeline.events if e.kind == "send"}
    assert done >= {(rank, step) for rank in range(size) for step in steps}
    workers = [clock for clock in timeline.clocks if clock.rank < size]
    assert [clock.rank for clock in workers] == list(range(1, size))
    assert min(clock.num_bursts for clock in workers) >= 10


def but_for(rank: int, variable: str) -> tuple[str, ...]:
    """What a launcher starts before a command that all ranks but one shall run."""
    return ("sh", "-c", f'[ "${variable}" = {rank} ] && exec sleep 100; exec "$@"', "sh")


def answer(*arguments: str, **variables: str) -> Finished:
    """What `testbed ...` says, called in this process; it must start none.

    Args:
        arguments: as a user writes them.
        variables: of the environment, for this call.
    """
    out, err = io.StringIO(), io.StringIO()
    status: object = 0
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"COLUMNS": "120", **variables}.items():
            patch.setenv(name, value)
        patch.setenv("THP_MEM_ALLOC_ENABLE", "1")  # else the command would leave it set
        patch.setattr(os, "_exit", _no_rank)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main(arguments)
            except SystemExit as end:
                status = end.code or 0
    assert isinstance(status, int), status
    return Finished(status, out.getvalue(), err.getvalue())


def _no_rank(status: int) -> NoReturn:
    raise AssertionError(f"it trained here and would have left with {status}; start a process")


def wait_for(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    """Until something is so; what never is fails the test."""
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def end_family(pid: int) -> None:
    parent = psutil.Process(pid)
    for process in [*parent.children(recursive=True), parent]:
        process.kill()


testbed.__test__ = False  # type: ignore[attr-defined]
