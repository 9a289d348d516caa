"""Where `--tune` runs what it confirms, and where its log lies."""

from __future__ import annotations

import functools
import sys
import tempfile
from pathlib import Path

import msgspec

from testbed.base.config import RunConfig
from testbed.base.errors import UsageError
from testbed.base.files import write_atomically
from testbed.records.cell import Cell
from testbed.records.store import Store, cell_key
from testbed.sweeping.executor import ProcessRunner, Runner, run_command


def tuned_run(
    config: RunConfig,
    launcher: str,
    json: Path | None,
    hostfile: Path | None = None,
    interface: str = "",
) -> RunConfig:
    """A run with its knobs found; the log lies beside its record, if it leaves one."""
    from testbed.launch.tuning import tuned

    if launcher != "alone":
        raise UsageError(
            f"--tune starts runs of its own, and this is a rank that {launcher} started; tune "
            "without a launcher, or give the knobs by hand"
        )
    with tempfile.TemporaryDirectory(prefix="testbed-tune-") as folder:
        place = Path(folder)
        command = functools.partial(run_command, hostfile=hostfile, interface=interface)
        runner = ProcessRunner(command)

        def measure(one: RunConfig, number: int) -> Cell:
            return runner(one, place / f"{number}.json", place / f"{number}.log")

        log = place / "samples.csv"
        found = tuned(config, log, measure)
        samples = log.read_text() if log.exists() else ""
    told = f"tuned ({found.tuned})" if found.tuned else "this method has no knobs that are open"
    where = ""
    if json is not None and samples:  # the log of an earlier search stays until there is another
        log = json.with_suffix(".tuning.csv")
        write_atomically(log, samples.encode())
        where, samples = f": {log}", ""
    sys.stderr.write(f"testbed: {told}{where}\n{samples}")
    return found


def tuned_cell(store: Store, runner: Runner, config: RunConfig) -> RunConfig:
    """A sweep's cell with its knobs found, once for all repeats; the log lies beside its record."""
    from testbed.launch.tuning import tuned

    first = msgspec.structs.replace(config, repeat=0)
    key = cell_key(first)

    def measure(one: RunConfig, number: int) -> Cell:
        place = store.scratch / f"{key}-trial-{number}"
        return runner(one, place.with_suffix(".json"), place.with_suffix(".log"))

    found = tuned(first, store.cells / f"{key}.tuning.csv", measure)
    return msgspec.structs.replace(found, repeat=config.repeat)
