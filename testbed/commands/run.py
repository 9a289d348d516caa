"""`testbed run`: one cell."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from testbed.base.axes import BACKENDS, WORKLOADS, BackendFacts
from testbed.base.config import RunConfig, make_config, to_arguments
from testbed.base.files import write_atomically
from testbed.base.parts import Resolved
from testbed.cluster.facts import find_facts
from testbed.commands.checks import (
    check_device,
    check_files,
    check_inputs,
    check_one_place,
    check_places,
    cluster_text,
    in_cluster,
)
from testbed.commands.settings import takes_settings, values_of
from testbed.commands.tuning import tuned_run
from testbed.launch import processes
from testbed.launch.allocation import run_in_cluster
from testbed.launch.host import threads_of
from testbed.launch.job import Job, run_job
from testbed.launch.join import Role, assign_role, who_am_i
from testbed.launch.plan_options import parts_of
from testbed.records.cell import Cell, encode_cell
from testbed.reporting.cell_text import describe_cell
from testbed.sweeping.executor import failed_cell

# The first optimizer imports torch._dynamo, which takes as long as torch itself.
RANK_MODULES = ("testbed.cli", "testbed.launch.worker", "torch._dynamo")


@takes_settings
def run(
    hostfile: Annotated[
        Path | None, typer.Option(help="Open MPI hostfile: start the ranks on these hosts")
    ] = None,
    interface: Annotated[
        str | None, typer.Option(help="network interface or address to use", show_default="decided")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="write the cell (schema testbed.cell/1) here")
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            help="record what every rank does in the measured steps, and write it here as a Chrome "
            "trace (schema testbed.timeline/1), for Perfetto or speedscope"
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="do not tell how far the run is")] = False,
    **given: Any,
) -> None:
    """Train one workload on one backend, measure it, and prove what it did.

    While it runs it shows on standard error a bar with the time of a step and the remaining time;
    where that is no terminal, a line every ten seconds.

    Examples:
        testbed run --workload digits-cnn --backend zmq-ps --workers 4 --steps 100

        mpirun --oversubscribe --allow-run-as-root -n 4 testbed run --backend mpi-ring

        torchrun --nproc-per-node 2 -m testbed run --backend gloo --json cell.json

        testbed run --backend mpi-ring --compressor ef+topk:ratio=0.01

        testbed run --backend mpi-ring --cluster nodes=4,rate=1gbit

        testbed run --workload my_model.py:build --backend mpi --workers 2

        testbed run --backend zmq-ps --timeline steps.json
    """
    given = values_of(given)
    here = find_facts(os.environ)
    workers = given.get("workers")
    given["cluster"] = cluster_text(given.get("cluster"), here)
    asked: Resolved[BackendFacts] = BACKENDS.resolve(given["backend"])
    elsewhere = hostfile is not None and given["cluster"] is None  # this host may lack their GPUs
    if not elsewhere:
        asked = asked.usable()
    if given["cluster"] is not None:
        given["workers"] = check_places(given["cluster"], asked, workers)
        check_one_place(here, hostfile)
    config = make_config(given)
    identity = who_am_i()
    parts = parts_of(config)
    if identity.rank == 0:  # which writes them; folders of other ranks may be of other hosts
        check_files(json, hostfile, timeline)
    files = _Files(interface, json, timeline, quiet)
    check_inputs(config, config.workers if identity.launcher == "alone" else None)
    if not elsewhere:
        check_device(config.device)
    if config.tune is not None:
        config = tuned_run(config, identity.launcher, json, hostfile, interface or "")
    if config.cluster is not None and here is None:
        again = _arguments(config, files)
        raise typer.Exit(
            run_in_cluster(config.cluster, processes.own_command(*again), config.deadline)
        )
    if identity.launcher != "alone":
        role = assign_role(identity, asked, workers)
        config = msgspec.structs.replace(config, workers=role.num_workers)
        raise typer.Exit(_finish(_as_rank(config, role, files), json))
    role = Role(identity, asked, config.workers, asked.facts.num_servers)
    if asked.facts.in_process or not (
        asked.facts.needs_mpi or config.workers + role.num_servers > 1 or hostfile
    ):
        raise typer.Exit(_finish(_in_this_process(config, role, files), json))
    if here is not None:
        hostfile = hostfile or Path(here.hostfile)
    modules = (*RANK_MODULES, *parts[WORKLOADS.what].facts.imports)
    raise typer.Exit(_start(config, role, hostfile, files, modules))


class _Files(NamedTuple):
    """What a rank is told that is no part of the configuration."""

    interface: str | None
    json: Path | None
    timeline: Path | None
    quiet: bool


def _as_rank(config: RunConfig, role: Role, files: _Files) -> Cell | None:
    from testbed.launch.worker import Settings, run_rank

    return run_rank(
        config, role, Settings(files.interface, role.identity.launcher, files.timeline, files.quiet)
    )


def _in_this_process(config: RunConfig, role: Role, files: _Files) -> Cell | None:
    from testbed.launch.worker import Settings, run_threads

    if role.backend.facts.in_process:
        return run_threads(config, role, Settings(timeline=files.timeline, quiet=files.quiet))
    return _as_rank(config, role, files)


def _arguments(config: RunConfig, files: _Files) -> list[str]:
    """The command line that starts this run again."""
    arguments = ["run", *to_arguments(config)]
    arguments += ["--interface", files.interface] if files.interface else []
    arguments += ["--quiet"] if files.quiet else []
    arguments += ["--json", str(files.json.absolute())] if files.json else []
    return arguments + (["--timeline", str(files.timeline.absolute())] if files.timeline else [])


def _start(
    config: RunConfig,
    role: Role,
    hostfile: Path | None,
    files: _Files,
    modules: Sequence[str],
) -> int:
    """Start the ranks, wait for them, and leave a record even if they fail."""
    size = config.workers + role.num_servers
    threads = config.threads or threads_of(size, find_facts(os.environ))
    job = Job(
        processes.own_command(*_arguments(config, files)),
        size,
        threads,
        role.backend.facts.needs_mpi,
        hostfile,
        one_machine=config.cluster is not None,
        modules=modules,
        quiet=files.quiet,
    )
    before = _version(files.json)
    over = run_job(job, config.deadline)
    if not over.words:
        return over.status
    is_written = _version(files.json) != before
    if files.json is not None and not is_written:
        failed = failed_cell(config, "\n".join([*over.said, over.words]))
        write_atomically(files.json, encode_cell(in_cluster(failed, find_facts(os.environ))))
    sys.stderr.write(f"testbed: the run failed: {over.words}\n")
    if is_written:
        sys.stderr.write(
            f"testbed: rank 0 had written its record before that: {files.json} is kept\n"
        )
    return over.status


def _version(path: Path | None) -> tuple[int, int] | None:
    """Changes when the file is written anew."""
    if path is None or not path.is_file():
        return None
    told = path.stat()
    return told.st_ino, told.st_mtime_ns


def _finish(cell: Cell | None, json: Path | None) -> int:
    if cell is None:
        return 0
    cell = in_cluster(cell, find_facts(os.environ))
    if json is not None:
        write_atomically(json, encode_cell(cell))
    if cell.status == "failed":
        sys.stderr.write(f"testbed: the run failed: {cell.error}\n")
        return 1

    sys.stdout.write(describe_cell(cell))
    return 0
