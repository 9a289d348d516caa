"""`testbed simulate`: plan and predicted timeline; nothing is executed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from testbed.base.axes import COMPRESSORS, SCHEDULERS
from testbed.base.errors import UsageError
from testbed.base.files import to_json, write_atomically
from testbed.base.plan import Plan, encode_plan
from testbed.base.spec import split_specs
from testbed.commands.checks import check_device, check_output, refuse_unused
from testbed.commands.simulate_memory import simulate_memory
from testbed.commands.simulate_text import curves_page, report
from testbed.prediction.nominal import parse_nominal
from testbed.prediction.timeline import Timeline
from testbed.records.simulation import Simulation
from testbed.simulation import Wanted, at_workers, parse_workers, with_codecs

T = TypeVar("T")

_OF_MEMORY = ("workload", "batch", "optimizer", "momentum", "budget_mb", "max_batch")
_OF_SCHEDULES = (
    *("trace", "link", "scheduler", "algorithm", "node_link", "check_link", "slowest_worker"),
    *("slowest_link", "break_even", "factors", "overlap_slowdown", "codecs", "codecs_out"),
    *("codec_speed", "device"),
)


def simulate(
    trace: Annotated[
        str | None,
        typer.Option(help="testbed.trace/1 file, or a shipped trace such as resnet50-v100"),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            help="testbed.link/1 file, as testbed comm --fit writes, or nominal numbers: "
            "rate=10gbit,latency=50us[,workers=4][,backend=mpi-ring]"
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="instead: what a step of --workload takes under these memory strategies",
            metavar="LIST",
            show_default="none",
        ),
    ] = None,
    workload: Annotated[
        str | None, typer.Option(help="with --memory: what is trained, as of testbed run")
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(
            help="with --memory: samples of a micro-batch: 8,32", show_default="the workload's"
        ),
    ] = None,
    optimizer: Annotated[str, typer.Option(help="with --memory: sgd, adam or adamw")] = "sgd",
    momentum: Annotated[
        float | None, typer.Option(help="with --memory: of SGD", show_default="the workload's")
    ] = None,
    budget_mb: Annotated[
        float | None,
        typer.Option(
            help="with --memory: MiB that a step is to fit; exit status 1 if nothing does"
        ),
    ] = None,
    max_batch: Annotated[
        bool, typer.Option("--max-batch", help="with --memory: the largest batch that fits")
    ] = False,
    scheduler: Annotated[
        str,
        typer.Option(
            help="name[:key=value,...],name,...; all = those for dense messages, without auto"
        ),
    ] = "all",
    workers: Annotated[
        str | None,
        typer.Option(
            help="at other numbers of workers: 2:2048 (powers of two) or 4,16,64",
            show_default="the link's",
        ),
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(
            help="that the link runs: ring, halving-doubling, recursive-doubling, tree, binomial, "
            "server[:servers=S,placement=colocated|dedicated,overlap=1,endpoint=0]",
            show_default="by the link's backend",
        ),
    ] = None,
    node_link: Annotated[
        Path | None,
        typer.Option(help="link between all ranks of one node: the algorithm runs between nodes"),
    ] = None,
    check_link: Annotated[
        list[Path] | None,
        typer.Option(help="link measured at another number of workers, to check the prediction"),
    ] = None,
    slowest_worker: Annotated[
        float, typer.Option(help="compute time of the slowest worker over the others'")
    ] = 1.0,
    slowest_link: Annotated[
        float, typer.Option(help="bandwidth of the slowest interface over the others'")
    ] = 1.0,
    break_even: Annotated[
        bool, typer.Option("--break-even", help="from and to which bandwidth each is worth it")
    ] = False,
    factors: Annotated[
        bool, typer.Option("--factors", help="what start-ups, bandwidth, head, tail, ... cost")
    ] = False,
    overlap_slowdown: Annotated[
        float,
        typer.Option(
            help="with --factors: by what part a message under way slows the backward pass"
        ),
    ] = 0.0,
    compressor: Annotated[
        str | None,
        typer.Option(
            help="under these compressors too, each measured here first: "
            "ef+topk:ratio=0.01,powersgd:rank=4",
            metavar="LIST",
            show_default="none",
        ),
    ] = None,
    codecs: Annotated[
        Path | None,
        typer.Option(help="testbed.codecs/1 file: what compressors cost, instead of measuring"),
    ] = None,
    codecs_out: Annotated[
        Path | None, typer.Option(help="save what compressors cost here (testbed.codecs/1)")
    ] = None,
    codec_speed: Annotated[
        float,
        typer.Option(help="how much faster than this machine's core the cluster compresses"),
    ] = 1.0,
    device: Annotated[
        str, typer.Option(help="cpu or cuda: where compressors are measured")
    ] = "cpu",
    plot: Annotated[
        Path | None,
        typer.Option(help="draw the curves over workers, or the memory over a step: .html or .svg"),
    ] = None,
    json: Annotated[
        str | None,
        typer.Option(
            help="write the results (schema testbed.simulation/1, with --memory testbed.memory/1) "
            "here; - = to stdout"
        ),
    ] = None,
    plan_out: Annotated[
        Path | None,
        typer.Option(
            help="save the plan (schema testbed.plan/1); several: one file each, named after it; "
            "with --memory the memory plan (testbed.memory-plan/1), for laysa:plan=FILE"
        ),
    ] = None,
) -> None:
    """Predict what schedulers do with a recorded model on a measured link, without running any.

    Prints a table, the fastest first, and each timeline; at several numbers of workers tables of
    iteration time, scaling factor and speed-up instead. A message of dear appears as its two
    halves, the fold behind backward and the spread before the next forward.

    Exit status: 0 fine, 1 no strategy and batch that was asked for fits --budget-mb, 2 asked for
    wrongly.

    Examples:
        testbed simulate --trace resnet50-v100 --link link.json

        testbed simulate --trace trace.json --link link.json \
--scheduler mg-wfbp,bucket:mib=4,first_mib=1,pace --json simulation.json

        testbed simulate --trace resnet50-v100 --link rate=10gbit,latency=50us --workers 8

        testbed simulate --trace trace.json --link link.json --scheduler auto --plan-out plan.json

        testbed simulate --trace resnet50-v100 --link link.json --workers 2:2048 --plot curves.html

        testbed simulate --memory none,checkpoint,laysa --workload resnet50 --batch 8,32

        testbed simulate --memory none,laysa --compressor none,ef:units=update+topk:ratio=0.01 \
--workload resnet50 --batch 8 --plot memory.svg

        testbed simulate --memory laysa --workload resnet50 --batch 8 --plan-out memory.json

        testbed simulate --trace resnet50-v100 --link link.json --scheduler wfbp,mg-wfbp,lags \
--compressor ef+topk:ratio=0.01,powersgd --break-even
    """
    if memory is None:
        refuse_unused(simulate, locals(), _OF_MEMORY, "without --memory")
        if not factors:
            refuse_unused(simulate, locals(), ("overlap_slowdown",), "without --factors")
        counted = workers or check_link or break_even or slowest_link != 1.0
        if not counted and link is not None and parse_nominal(str(link)) is None:
            changes = "without --workers, --check-link, --break-even or --slowest-link"
            refuse_unused(simulate, locals(), ("node_link",), changes)
    else:
        refuse_unused(simulate, locals(), _OF_SCHEDULES, "with --memory")
    check_plot(plot)
    if plan_out is not None:
        check_output("--plan-out", plan_out)
    if json is not None and json != "-":
        check_output("--json", Path(json))
    if memory is not None:
        at = parse_workers(workers) if workers is not None else (1,)
        if len(at) > 1:
            raise UsageError(f"--workers is {workers!r} with --memory; expected one number")
        fits = simulate_memory(
            memory,
            compressor or COMPRESSORS.default,
            {
                "workload": needed("--workload", workload),
                "workers": at[0],
                "optimizer": optimizer,
                "momentum": momentum,
            },
            parse_workers(batch, "--batch") if batch is not None else (),
            budget_mb,
            max_batch=max_batch,
            json=json,
            plot=plot,
            plan_out=plan_out,
        )
        if not fits:
            raise typer.Exit(1)
        return
    if codecs_out is not None:
        check_output("--codecs-out", codecs_out)
    wanted = Wanted.of(
        needed("--trace", trace),
        needed("--link", link),
        scheduler_specs(scheduler),
        parse_workers(workers) if workers is not None else None,
        algorithm,
        node_link=node_link,
        check_links=tuple(check_link or ()),
        slowest_worker=slowest_worker,
        slowest_link=slowest_link,
        break_even=break_even,
        factors=factors,
        overlap_slowdown=overlap_slowdown,
    )
    check_device(device)
    wanted = with_codecs(wanted, compressor, codecs, codecs_out, codec_speed, device)
    simulation, outcomes = at_workers(wanted)
    if plan_out is not None:
        _save_plans(plan_out, simulation, outcomes)
    if plot is not None:
        write_atomically(plot, curves_page(wanted, simulation, plot.suffix).encode())
    encoded = to_json(simulation)
    if json == "-":
        sys.stdout.write(encoded.decode())
        return
    if json is not None:
        write_atomically(Path(json), encoded)
    sys.stdout.write(report(wanted, simulation, outcomes))


def needed(option: str, value: T | None) -> T:
    """The value of an option that must be given here.

    Raises:
        UsageError: it was not.
    """
    if value is None:
        raise UsageError(
            f"{option} was not given; expected --trace and --link, or --memory and --workload"
        )
    return value


def scheduler_specs(text: str) -> tuple[str, ...]:
    """The schedulers that a comma-separated list names; `all` stands for those of dense messages.

    Raises:
        UsageError: none is named.

    Example:
        >>> scheduler_specs("wfbp,bucket:mib=4,first_mib=1")
        ('wfbp', 'bucket:mib=4,first_mib=1')
    """
    named = split_specs(text)
    if not named:
        raise UsageError(f"scheduler is {text!r}; expected name,name,... or all")
    specs: dict[str, None] = {}
    for name in named:
        specs.update(dict.fromkeys(_all() if name == "all" else (name,)))
    return tuple(specs)


def _all() -> tuple[str, ...]:
    """The schedulers of dense messages that decide by themselves, from the simplest on."""
    return SCHEDULERS.which(lambda facts: not (facts.sparse or facts.chooses))


def check_plot(path: Path | None) -> None:
    """Refuse a picture that cannot be drawn, before anything is computed.

    Raises:
        UsageError: another kind of file than HTML and SVG, or a folder that is not there.
    """
    if path is None:
        return
    if path.suffix not in (".html", ".svg"):
        raise UsageError(f"--plot is {path}; expected a name that ends in .html or .svg")
    check_output("--plot", path)


def _save_plans(path: Path, simulation: Simulation, outcomes: list[tuple[Plan, Timeline]]) -> None:
    several_workers = len({r.num_workers for r in simulation.results}) > 1
    for result, (plan, _) in zip(simulation.results, outcomes, strict=True):
        target = path
        if len(outcomes) > 1:
            of_workers = f"-{result.num_workers}" if several_workers else ""
            target = path.with_stem(f"{path.stem}-{_file_name(result.scheduler)}{of_workers}")
        write_atomically(target, encode_plan(plan))


def _file_name(spec: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in spec)
