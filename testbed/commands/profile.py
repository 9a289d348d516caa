"""`testbed profile`: how long each layer of a workload computes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from testbed.base.axes import WORKLOADS
from testbed.base.config import Precision, RunConfig
from testbed.base.errors import UsageError
from testbed.base.files import read_file, save_trace
from testbed.base.trace import Trace
from testbed.commands.checks import check_device, check_output, refuse_unused
from testbed.profiling.kineto import read_kineto
from testbed.profiling.table import imported_table, trace_table


def profile(
    workload: Annotated[
        str | None,
        typer.Option(
            help="name[:key=value,...] or file.py:function; see testbed list",
            show_default=WORKLOADS.default,
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda[:index]")] = "cpu",
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", "--batch", help="samples", show_default="the workload's own"),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="torch threads", show_default="torch's own choice")
    ] = None,
    warmup: Annotated[int, typer.Option(help="steps before any is timed")] = 5,
    repeats: Annotated[int, typer.Option(help="timed steps")] = 20,
    precision: Annotated[str, typer.Option(help="float32, float64, bf16 or fp16")] = "float32",
    data: Annotated[
        str | None, typer.Option(help="folder of the data set", show_default="synthetic")
    ] = None,
    seed: Annotated[int, typer.Option(help="of the weights and of synthetic samples")] = 1,
    from_kineto: Annotated[
        Path | None,
        typer.Option(
            help="read the times from this file of torch's profiler instead; with --workload: "
            "names and sizes from that model"
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="write the trace (testbed.trace/1) here")
    ] = None,
) -> None:
    """Record forward and backward time of each tensor of a workload, its sizes and its DAG.

    Steps run on one fixed batch; times are medians. On a GPU they are taken from the GPU's own
    queue. The trace is what `testbed simulate --trace` and schedulers plan with.

    Examples:
        testbed profile --workload resnet20 --batch-size 32 --threads 1 -o trace.json

        testbed profile --from-kineto profiler.json -o trace.json

        testbed run --workload replay:trace.json --backend gloo
    """
    if from_kineto is not None:
        unused = ("device", "threads", "warmup", "repeats", "precision")
        refuse_unused(profile, locals(), unused, "with --from-kineto")
    if warmup < 0 or repeats < 1:
        raise UsageError(
            f"--warmup is {warmup} and --repeats {repeats}; expected 0 or more and 1 or more"
        )
    if precision not in get_args(Precision):
        raise UsageError(
            f"--precision is {precision!r}; expected one of {', '.join(get_args(Precision))}"
        )
    if output is not None:
        check_output("-o", output)
    given: dict[str, Any] = {"precision": precision}
    config = RunConfig(
        workload=workload or WORKLOADS.default,
        device=device,
        batch_size=batch_size,
        threads=threads,
        data=data,
        seed=seed,
        **given,
    )
    if from_kineto is None:
        check_device(device)
        trace = profile_workload(config, warmup=warmup, repeats=repeats)
    else:
        named = None if workload is None else _parameters(config)
        trace = read_kineto(read_file(from_kineto), str(from_kineto), named, batch_size)

    sys.stdout.write((trace_table if from_kineto is None else imported_table)(trace))
    if output is not None:
        save_trace(trace, output)


def _parameters(config: RunConfig) -> list[tuple[str, int]]:
    """Names and sizes of the parameters that the workload's model trains, in its own order."""
    from testbed.workloads.load import load_workload

    workload = load_workload(config.workload, seed=config.seed, data_dir=config.data)
    return [(n, p.numel()) for n, p in workload.model.named_parameters() if p.requires_grad]


def profile_workload(config: RunConfig, *, warmup: int, repeats: int) -> Trace:
    """Build the workload as a run does, and record its step on its first samples.

    Raises:
        UsageError: workload, device or precision cannot be used.
    """
    import torch

    from testbed.profiling.overhead import training_step
    from testbed.profiling.recorder import record_trace
    from testbed.training.replica import make_replica
    from testbed.workloads.load import load_workload

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    workload = load_workload(config.workload, seed=config.seed, data_dir=config.data)
    replica = make_replica(workload, config, total_steps=1)
    replica.model.train()
    batch_size = config.batch_size or workload.batch_size
    # A data set smaller than the batch is gone through again.
    indices = [i % len(workload.train) for i in range(batch_size)]
    batch = replica.to_device(workload.train.batch(indices))
    return record_trace(
        replica.model,
        training_step(replica.loss, batch, replica.scaler),
        name=workload.name,
        device=config.device,
        batch_size=batch_size,
        warmup=warmup,
        repeats=repeats,
    )
