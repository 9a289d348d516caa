"""`testbed rerun`: a stored run made again, and whether it did the same."""

from __future__ import annotations

import functools
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from testbed.base.config import reproduce
from testbed.base.errors import RunFailed, UsageError
from testbed.base.files import write_atomically
from testbed.base.units import format_seconds
from testbed.commands.checks import check_files
from testbed.launch.join import who_am_i
from testbed.records.cell import encode_cell
from testbed.records.store import PLAN
from testbed.reporting.rerun import describe, rows_of, status_of, to_run
from testbed.reporting.sides import find_place, read_run
from testbed.sweeping.executor import ProcessRunner, run_command


def rerun(
    cell: Annotated[str, typer.Argument(help="a cell's .json, or FOLDER:KEY, or ARCHIVE:KEY")],
    json: Annotated[
        Path | None, typer.Option(help="write the new cell (schema testbed.cell/1) here")
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option(help="Open MPI hostfile: start the ranks on these hosts")
    ] = None,
) -> None:
    """Run a stored cell again from its record, and say whether digests and bytes agree.

    Its step time stands beside the stored one and the range of the stored repeats. Exit status: 0
    digests and bytes agree, 1 they differ or the run failed, 3 too little is recorded to tell.

    Examples:
        testbed rerun runs/results/quick-1/cells/0123456789abcdef.json

        testbed rerun quick.tar.gz:0123 --json again.json
    """
    check_files(json, hostfile)
    if (launcher := who_am_i().launcher) != "alone":
        raise UsageError(f"rerun starts its ranks itself; this is a rank that {launcher} started")
    stored, repeats = read_run(cell)
    if json is not None:
        _check_new(json, cell)
    config, changes = to_run(stored)
    trained_s = stored.training_time_s
    took = f" (it trained for {format_seconds(trained_s)})" if trained_s else ""
    with tempfile.TemporaryDirectory(prefix="testbed-rerun-") as folder:
        runner = ProcessRunner(functools.partial(run_command, hostfile=hostfile))
        try:
            sys.stderr.write(f"testbed: running again{took}: {reproduce(config)}\n")
            now = runner(config, Path(folder) / "cell.json", Path(folder) / "log")
        except KeyboardInterrupt:
            sys.stderr.write("testbed: interrupted; all ranks have ended\n")
            raise typer.Exit(130) from None
    if json is not None:
        write_atomically(json, encode_cell(now))
    if now.status != "ok":
        raise RunFailed(f"run again, it failed: {now.error}")
    sys.stdout.write(describe(stored, now, repeats, changes))
    raise typer.Exit(status_of(rows_of(stored, now)))


def _check_new(json: Path, cell: str) -> None:
    """Refuse to write the new run over anything that is stored with the old one.

    Raises:
        UsageError: the file is there, and is the stored run, or lies in its sweep's folder.
    """
    place, _ = find_place(cell)
    within = (place.parent if (place.parent / PLAN).exists() else place).resolve()
    given = json.resolve()
    if json.exists() and within in (given, *given.parents):
        raise UsageError(
            f"--json is {str(json)!r}, which is stored with the run and would be replaced by the "
            "new one; name another file"
        )
