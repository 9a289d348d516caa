"""`testbed run`: one cell."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import typer

from testbed.backends.protocol import BackendKind
from testbed.cluster.facts import find_facts
from testbed.cluster.spec import dilation_of
from testbed.commands.place import check_one_place, check_places, cluster_text, in_cluster
from testbed.config import RunConfig, reproduce, to_arguments
from testbed.errors import Unavailable, UsageError
from testbed.launch import tree
from testbed.launch.emulated import run_in_cluster
from testbed.launch.job import Job, run_job
from testbed.launch.join import Role, assign_role, resolve_backend, who_am_i
from testbed.launch.threads import threads_of
from testbed.records.cell import Cell, encode_cell
from testbed.records.store import write_atomically
from testbed.registry import WORKLOADS
from testbed.scheduling.protocol import resolve_scheduler
from testbed.spec import parse_spec
from testbed.units import parse_seconds


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
        bool, typer.Option("--predict", help="profile first, and predict the step time")
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
    given["target_accuracy"] = parse_targets(target_accuracy)
    here = find_facts(os.environ)
    given["cluster"] = cluster_text(cluster, here)
    kind, options = resolve_backend(backend)
    if given["cluster"] is not None:
        given["workers"] = check_places(given["cluster"], kind, options, workers)
        check_one_place(here, hostfile)
    config = make_config(given)
    identity = who_am_i()
    check_workload(config.workload, dilation_of(config.cluster))
    resolve_scheduler(config.scheduler)
    check_compressor(config, kind, options)
    check_files(json, hostfile)
    check_inputs(config, config.workers if identity.launcher == "alone" else None)
    check_device(config.device)
    if config.cluster is not None and here is None:
        again = _arguments(config, interface, json)
        raise typer.Exit(run_in_cluster(config.cluster, tree.own_command(*again), config.deadline))
    if identity.launcher != "alone":
        role = assign_role(identity, kind, options, workers)
        config = msgspec.structs.replace(config, workers=role.num_workers)
        raise typer.Exit(_finish(_as_rank(config, role, interface), json))
    role = Role(identity, kind, options, config.workers, kind.num_servers(options))
    if kind.in_process or not (kind.needs_mpi or config.workers + role.num_servers > 1 or hostfile):
        raise typer.Exit(_finish(_in_this_process(config, role, interface), json))
    if here is not None:
        hostfile = hostfile or Path(here.hostfile)
    raise typer.Exit(_start(config, role, hostfile, interface, json))


def parse_targets(text: str | None) -> tuple[float, ...]:
    """Accuracies to note, from `0.95,0.97`."""
    try:
        return tuple(float(piece) for piece in (text or "").split(",") if piece)
    except ValueError as error:
        raise UsageError(
            f"--target-accuracy is {text!r}; expected e.g. 0.95 or 0.95,0.97"
        ) from error


def make_config(given: dict[str, Any]) -> RunConfig:
    """A checked configuration.

    Raises:
        UsageError: a value is not allowed; says which are.
    """
    for name, hint in get_type_hints(RunConfig).items():
        allowed = get_args(hint) if get_origin(hint) is Literal else ()
        if name in given and allowed and given[name] not in allowed:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} is {given[name]!r}; expected {' or '.join(allowed)}")
    try:
        return msgspec.convert(given, RunConfig)
    except msgspec.ValidationError as error:
        cause = error.__cause__
        raise cause if isinstance(cause, UsageError) else UsageError(str(error)) from error


def check_workload(text: str, dilation: float = 1.0) -> None:
    """Fail before any process is started if the workload cannot be had, or not at this dilation.

    Raises:
        UnknownName, UsageError, Unavailable: as loading it would.
    """
    from testbed.own_spec import parse_own_model
    from testbed.workload_kinds import check_dilation, kind_options, workload_availability

    check_dilation(text, dilation)
    own = parse_own_model(text)
    if own is not None:
        if not own.path.is_file():
            raise UsageError(f"workload is {text!r}, but there is no file {str(own.path)!r}")
        return
    spec = parse_spec(text)
    lacking = workload_availability(spec.name)
    if lacking is not None:
        raise Unavailable("workload", spec.name, *lacking)
    kind_options(WORKLOADS.load(spec.name), spec.options)


def check_compressor(config: RunConfig, kind: BackendKind, options: object) -> None:
    """Fail before any process is started if the compressor cannot be had, or not with these.

    Raises:
        UnknownName, UsageError: names the compressor, and what does not go with it.
    """
    if config.compressor == RunConfig().compressor:
        return
    from testbed.compression.chain import resolve_compressor

    compressor, what = resolve_compressor(config.compressor), f"--compressor {config.compressor}"
    if kind.schedule(options) is not None:
        raise UsageError(
            f"{what} compresses what a plan sends, and backend {config.backend!r} exchanges "
            "gradients by itself; use another backend"
        )
    if config.precision == "fp16":
        raise UsageError(
            f"{what} cannot stand beside --precision fp16, whose gradient scale would stay in what "
            "is kept from step to step; use bf16 or float32"
        )
    if getattr(options, "repack", False) and (config.checkpoint or config.resume_from):
        raise UsageError(
            f"with {config.backend!r} servers keep what they did not send back, which no "
            "checkpoint holds; leave out repack, or --checkpoint and --resume-from"
        )
    if compressor.claims.carries_momentum and config.optimizer != "sgd":
        raise UsageError(
            f"{what} does the momentum of SGD itself, and --optimizer is {config.optimizer}; use "
            "sgd, or give the compressor momentum=0"
        )


def check_files(json: Path | None, hostfile: Path | None) -> None:
    """Fail before any process is started if a file cannot be read or written.

    Raises:
        UsageError: names the option and the path.
    """
    if json is not None and not json.resolve().parent.is_dir():
        raise UsageError(f"--json is {str(json)!r}, but there is no folder {str(json.parent)!r}")
    if hostfile is not None and not hostfile.is_file():
        raise UsageError(f"--hostfile is {str(hostfile)!r}, but there is no such file")


def check_inputs(config: RunConfig, num_workers: int | None) -> None:
    """Fail before any process is started if what a plan is made from cannot be had.

    Args:
        config: of the run.
        num_workers: how many there will be; None = a launcher decides.

    Raises:
        UsageError: names the option and the file, or the rank that is not there.
    """
    for option, path in (("--link", config.link), ("--plan", config.plan)):
        if path is not None and not Path(path).is_file():
            raise UsageError(f"{option} is {path!r}, but there is no such file")
    if config.trace is not None:
        from testbed.prediction.shipped import find_trace

        find_trace(config.trace)
    if config.slow is not None:
        from testbed.training.slowdown import parse_slowdowns

        parse_slowdowns(config.slow, num_workers)


def check_device(device: str) -> None:
    """Fail before any process is started if there is no such device.

    Raises:
        UsageError: says what is there.
    """
    if device == "cpu":
        return
    import torch

    if not device.startswith("cuda"):
        raise UsageError(f"--device is {device!r}; expected cpu or cuda")
    if not torch.cuda.is_available():
        raise UsageError(f"--device is {device!r}, but no CUDA device is visible; use cpu")


def _as_rank(config: RunConfig, role: Role, interface: str | None) -> Cell | None:
    from testbed.launch.worker import Settings, run_rank

    return run_rank(config, role, Settings(interface, role.identity.launcher))


def _in_this_process(config: RunConfig, role: Role, interface: str | None) -> Cell | None:
    from testbed.launch.worker import run_threads

    if role.kind.in_process:
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
        tree.own_command(*_arguments(config, interface, json)),
        size,
        threads,
        role.kind.needs_mpi,
        hostfile,
        one_machine=config.cluster is not None,
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
    from testbed.reporting.cell_text import describe_cell

    sys.stdout.write(describe_cell(cell))
    return 0
