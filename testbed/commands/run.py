"""`testbed run`: one cell."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from testbed.base.axes import BACKENDS, SCHEDULERS
from testbed.base.config import RunConfig, reproduce, to_arguments
from testbed.base.units import parse_seconds
from testbed.cluster.facts import find_facts
from testbed.cluster.spec import dilation_of
from testbed.commands.checks import (
    check_compressor,
    check_device,
    check_files,
    check_inputs,
    check_one_place,
    check_places,
    check_workload,
    cluster_text,
    in_cluster,
    make_config,
    parse_targets,
)
from testbed.launch import processes
from testbed.launch.allocation import run_in_cluster
from testbed.launch.host import threads_of
from testbed.launch.job import Job, run_job
from testbed.launch.join import Role, assign_role, who_am_i
from testbed.records.cell import Cell, encode_cell
from testbed.records.store import write_atomically
from testbed.reporting.cell_text import describe_cell
from testbed.workloads.kinds import imports_of

# The first optimizer imports torch._dynamo, which takes as long as torch itself.
RANK_MODULES = ("testbed.cli", "testbed.launch.worker", "torch._dynamo")


def run(
    workload: Annotated[
        str, typer.Option(help="name[:key=value,...] or file.py:function")
    ] = "digits-cnn",
    backend: Annotated[
        str, typer.Option(help="name[:key=value,...]; see testbed list")
    ] = "mpi-ring",
    scheduler: Annotated[
        str, typer.Option(help="when gradients leave: name[:key=value,...]; see testbed list")
    ] = "wfbp",
    compressor: Annotated[
        str,
        typer.Option(
            help="what gradients are made smaller by: name[:key=value,...], wrappers before it "
            "with +: ef+topk:ratio=0.01; see testbed list"
        ),
    ] = "none",
    workers: Annotated[
        int | None,
        typer.Option(
            help="training processes (alone: 2; under a launcher: what it started; in a cluster: "
            "its places)",
            show_default=False,
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="emulate a cluster: nodes=4,rate=10gbit,dilation=10; see testbed cluster",
            show_default="none",
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="steps to train (100 if no epochs are given)", show_default=False),
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="epochs to train, instead of steps")] = None,
    warmup: Annotated[
        int | None,
        typer.Option(
            help="first steps that are not measured", show_default="5, or a quarter if few"
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(help="samples per worker and micro-batch", show_default="the workload's"),
    ] = None,
    optimizer: Annotated[str, typer.Option(help="sgd, adam or adamw")] = "sgd",
    learning_rate: Annotated[float | None, typer.Option(show_default="the workload's")] = None,
    momentum: Annotated[float | None, typer.Option(show_default="the workload's")] = None,
    weight_decay: Annotated[float | None, typer.Option(show_default="the workload's")] = None,
    schedule: Annotated[
        str, typer.Option(help="of the learning rate: constant, cosine or linear")
    ] = "constant",
    warmup_steps: Annotated[int, typer.Option(help="steps of linear learning-rate warm-up")] = 0,
    accumulate: Annotated[int, typer.Option(help="micro-batches per step")] = 1,
    clip_norm: Annotated[
        float | None, typer.Option(help="clip gradients to this global norm")
    ] = None,
    precision: Annotated[
        str, typer.Option(help="float32, float64, bf16 or fp16 (mixed)")
    ] = "float32",
    seed: Annotated[int, typer.Option(help="of weights, sample order and dropout")] = 1,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    threads: Annotated[
        int | None, typer.Option(help="torch threads per rank", show_default="cores / ranks")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="folder of the data set (CIFAR-10, ImageNet)", show_default="synthetic"),
    ] = None,
    target_accuracy: Annotated[
        str | None, typer.Option(help="note when these are reached: 0.95,0.97")
    ] = None,
    evaluate_every: Annotated[
        int | None, typer.Option(help="steps between evaluations", show_default="an epoch")
    ] = None,
    verify_steps: Annotated[
        int, typer.Option(help="steps compared with one process; 0 = do not")
    ] = 20,
    slow: Annotated[
        str | None, typer.Option(help="hold up workers: rank=1,delay=50ms[,every=8][;...]")
    ] = None,
    deadline: Annotated[str, typer.Option(help="a lost rank ends the run within this time")] = "10",
    start_deadline: Annotated[
        str, typer.Option(help="all ranks must have started and joined within this time")
    ] = "120",
    checkpoint: Annotated[str | None, typer.Option(help="folder to save checkpoints in")] = None,
    every: Annotated[
        int | None, typer.Option(help="steps between checkpoints", show_default="only the last")
    ] = None,
    resume_from: Annotated[
        str | None, typer.Option(help="folder of checkpoints to go on from")
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            help="plan from this trace: testbed.trace/1 file or shipped name", show_default="made"
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(help="plan for this link (testbed.link/1)", show_default="measured"),
    ] = None,
    plan: Annotated[str | None, typer.Option(help="run this plan (testbed.plan/1)")] = None,
    predict: Annotated[
        bool,
        typer.Option(
            "--predict",
            help="profile first, and predict the step time; where --link gives no link, plans that "
            "the link decides, by priority or in halves are rehearsed for a few steps of a replay",
        ),
    ] = False,
    hostfile: Annotated[
        Path | None, typer.Option(help="Open MPI hostfile: start the ranks on these hosts")
    ] = None,
    interface: Annotated[
        str | None, typer.Option(help="network interface or address to use", show_default="decided")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="write the cell (schema testbed.cell/1) here")
    ] = None,
    repeat: Annotated[
        int, typer.Option(help="number of the repeat, for the record", hidden=True)
    ] = 0,
) -> None:
    """Train one workload on one backend, measure it, and prove what it did.

    Every ten seconds it tells, on standard error, what rank 0 is doing.

    Examples:
        testbed run --workload digits-cnn --backend zmq-ps --workers 4 --steps 100

        mpirun --oversubscribe --allow-run-as-root -n 4 testbed run --backend mpi-ring

        torchrun --nproc-per-node 2 -m testbed run --backend gloo --json cell.json

        testbed run --backend mpi-ring --compressor ef+topk:ratio=0.01

        testbed run --backend mpi-ring --cluster nodes=4,rate=1gbit

        testbed run --workload my_model.py:build --backend mpi --workers 2
    """
    given: dict[str, Any] = {
        name: value
        for name, value in locals().items()
        if name in RunConfig.__struct_fields__ and value is not None
    }
    given["deadline"] = parse_seconds(deadline)
    given["start_deadline"] = parse_seconds(start_deadline)
    given["target_accuracy"] = parse_targets(target_accuracy)
    here = find_facts(os.environ)
    given["cluster"] = cluster_text(cluster, here)
    asked = BACKENDS.resolve(backend).usable()
    if given["cluster"] is not None:
        given["workers"] = check_places(given["cluster"], asked, workers)
        check_one_place(here, hostfile)
    config = make_config(given)
    identity = who_am_i()
    check_workload(config.workload, dilation_of(config.cluster))
    SCHEDULERS.resolve(config.scheduler)
    check_compressor(config, asked)
    check_files(json, hostfile)
    check_inputs(config, config.workers if identity.launcher == "alone" else None)
    check_device(config.device)
    if config.cluster is not None and here is None:
        again = _arguments(config, interface, json)
        raise typer.Exit(
            run_in_cluster(config.cluster, processes.own_command(*again), config.deadline)
        )
    if identity.launcher != "alone":
        role = assign_role(identity, asked, workers)
        config = msgspec.structs.replace(config, workers=role.num_workers)
        raise typer.Exit(_finish(_as_rank(config, role, interface), json))
    role = Role(identity, asked, config.workers, asked.facts.num_servers)
    if asked.facts.in_process or not (
        asked.facts.needs_mpi or config.workers + role.num_servers > 1 or hostfile
    ):
        raise typer.Exit(_finish(_in_this_process(config, role, interface), json))
    if here is not None:
        hostfile = hostfile or Path(here.hostfile)
    raise typer.Exit(_start(config, role, hostfile, interface, json))


def _as_rank(config: RunConfig, role: Role, interface: str | None) -> Cell | None:
    from testbed.launch.worker import Settings, run_rank

    return run_rank(config, role, Settings(interface, role.identity.launcher))


def _in_this_process(config: RunConfig, role: Role, interface: str | None) -> Cell | None:
    from testbed.launch.worker import run_threads

    if role.backend.facts.in_process:
        return run_threads(config, role)
    return _as_rank(config, role, interface)


def _arguments(config: RunConfig, interface: str | None, json: Path | None) -> list[str]:
    """The command line that starts this run again."""
    arguments = ["run", *to_arguments(config)]
    arguments += ["--interface", interface] if interface else []
    return arguments + (["--json", str(json.resolve())] if json else [])


def _start(
    config: RunConfig, role: Role, hostfile: Path | None, interface: str | None, json: Path | None
) -> int:
    """Start the ranks, wait for them, and leave a record even if they fail."""
    size = config.workers + role.num_servers
    threads = config.threads or threads_of(size, find_facts(os.environ))
    job = Job(
        processes.own_command(*_arguments(config, interface, json)),
        size,
        threads,
        role.backend.facts.needs_mpi,
        hostfile,
        one_machine=config.cluster is not None,
        modules=(*RANK_MODULES, *imports_of(config.workload)),
    )
    over = run_job(job, config.deadline)
    if not over.words:
        return over.status
    sys.stderr.write(f"testbed: the run failed: {over.words}\n")
    if json is not None:
        failed = Cell(
            status="failed",
            backend=config.backend,
            workload=config.workload,
            num_workers=config.workers,
            config=config,
            command=reproduce(config),
            error="\n".join([*over.said, over.words]),
        )
        write_atomically(json, encode_cell(in_cluster(failed, find_facts(os.environ))))
    return over.status


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
