"""Runs one cell in processes of its own and hands back what it left."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from testbed.base.config import RunConfig, reproduce, to_arguments
from testbed.base.units import format_seconds
from testbed.forking import through_stub
from testbed.records.cell import Cell, decode_cell
from testbed.records.progress import VARIABLE
from testbed.records.store import timeline_of

Command = Callable[[RunConfig, Path], list[str]]

MODULES = ("testbed.cli", "testbed.workloads.load")  # what `testbed run` imports to check a cell

# What a failed cell keeps of a record: what was run, and where; nothing that was measured.
_KEPT = (
    *("backend", "workload", "data", "num_workers", "num_servers", "num_processes", "num_machines"),
    *("steps", "batch_size", "consistency", "scheduler", "dilation", "cluster", "environment"),
    *("config", "command"),
)
_PROGRESS = "testbed: after "  # what a long run tells beside what went wrong
_LOG_TAIL_LINES = 12
_LOG_TAIL_BYTES = 1 << 16


class Runner(Protocol):
    """Runs a cell to its end; never raises because of what happens inside the cell."""

    def __call__(self, config: RunConfig, json_path: Path, log_path: Path) -> Cell:
        """The cell, finished or failed.

        Args:
            config: what to run.
            json_path: where the run may write its cell; not there before.
            log_path: where its output goes.
        """
        ...


def progress_file(json_path: Path) -> Path:
    """Where a cell's rank 0 tells how far it is, beside its JSON.

    Example:
        >>> progress_file(Path("c.json")).name
        'c.progress'
    """
    return json_path.with_suffix(".progress")


def run_command(
    config: RunConfig,
    json_path: Path,
    hostfile: Path | None = None,
    *,
    interface: str = "",
    timeline: bool = False,
) -> list[str]:
    """The command line of one cell; with a timeline that is written beside its JSON.

    Example:
        >>> run_command(RunConfig(workers=4), Path("c.json"))[-4:]
        ['--workers', '4', '--json', 'c.json']
    """
    where = ["--hostfile", str(hostfile)] if hostfile else []
    where += ["--interface", interface] if interface else []
    run = [sys.executable, "-m", "testbed", "run", *to_arguments(config)]
    recorded = ["--timeline", str(timeline_of(json_path))] if timeline else []
    return [*run, *where, "--json", str(json_path), *recorded]


@dataclass(frozen=True)
class ProcessRunner:
    """Runs each cell under a supervisor (see `testbed.sweeping.supervise`).

    Attributes:
        command: the command line of a cell; its JSON belongs at the given path.
        timeout_s: seconds that a cell may take; None = no limit.
        grace_s: seconds that a cell's processes get to end by themselves when told to: more than a
            cell gives its own ranks before it takes an emulated cluster down.
        environment: variables of the cell's processes; None = this process's own. A sweep that a
            launcher started leaves the launcher's out, so that a cell starts a job of its own.
    """

    command: Command = run_command
    timeout_s: float | None = None
    grace_s: float = 20.0
    environment: Mapping[str, str] | None = None

    def __call__(self, config: RunConfig, json_path: Path, log_path: Path) -> Cell:
        """See `Runner`."""
        environment = dict(os.environ if self.environment is None else self.environment)
        if config.threads is not None:  # as its ranks will have it, which are forked from the same
            environment.setdefault("OMP_NUM_THREADS", str(config.threads))
        told = progress_file(json_path).absolute()
        told.write_bytes(b"")
        environment[VARIABLE] = str(told)
        command = through_stub(self.command(config, json_path), environment, MODULES)
        supervisor = [sys.executable, "-m", "testbed.sweeping.supervise", str(self.grace_s)]
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [*supervisor, *command],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C reaches the sweep alone
            )
            try:
                code = process.wait(self.timeout_s)
                reason = "" if code == 0 else f"exit status {code}"
            except subprocess.TimeoutExpired:
                limit = format_seconds(self.timeout_s or 0)
                reason = f"not done within the cell's time limit of {limit} and ended"
            finally:
                self._end(process)
                told.unlink(missing_ok=True)
        return collect(config, json_path, log_path, reason)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Close the supervisor's input, upon which it ends the cell, and wait for it."""
        if process.stdin:
            process.stdin.close()
        try:
            process.wait(3 * self.grace_s + 5)
        except subprocess.TimeoutExpired:
            process.kill()  # the cell's first process dies with it
            process.wait()


def collect(config: RunConfig, json_path: Path, log_path: Path, reason: str) -> Cell:
    """The cell that a run left, or a failed one that says why there is none.

    Args:
        config: what was run.
        json_path: where the run was to write its cell.
        log_path: its output.
        reason: empty if the run ended well, else why not.
    """
    cell, problem = _read(json_path)
    if cell is not None and not reason and cell.status == "ok":
        cell.config = msgspec.structs.replace(cell.config, repeat=config.repeat)
        return cell
    if cell is not None and cell.error:
        return failed_cell(config, cell.error, cell)
    why = reason or problem or "the run reports a failure"
    said = _tail(log_path)
    return failed_cell(config, f"{why}\n{said}" if said else why, cell)


def failed_cell(config: RunConfig, error: str, known: Cell | None = None) -> Cell:
    """A cell without figures; what a failed run could still tell (its environment) is kept.

    Figures of its record are dropped: it was written before the run failed, or measured elsewhere
    than was asked for.
    """
    if known is not None:
        kept = Cell(status="failed", error=error, **{name: getattr(known, name) for name in _KEPT})
        kept.config = msgspec.structs.replace(known.config, repeat=config.repeat)
        return kept
    return Cell(
        status="failed",
        backend=config.backend,
        workload=config.workload,
        num_workers=config.workers,
        steps=config.steps or 0,
        batch_size=config.batch_size or 0,
        config=config,
        command=reproduce(config),
        error=error,
    )


def _read(path: Path) -> tuple[Cell | None, str]:
    if not path.is_file():
        return None, "it wrote no result"
    try:
        return decode_cell(path.read_bytes()), ""
    except msgspec.DecodeError as error:
        return None, f"its result cannot be read: {error}"


def _tail(log_path: Path) -> str:
    """The last lines of a log, for the cell's error."""
    if not log_path.is_file():
        return ""
    with log_path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _LOG_TAIL_BYTES))
        text = file.read().decode(errors="replace")
    lines = [line for line in text.strip().splitlines() if not line.startswith(_PROGRESS)]
    return "\n".join(lines[-_LOG_TAIL_LINES:])
