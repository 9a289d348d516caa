"""`testbed plan`: a plan for a framework that schedules by itself; nothing is executed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from testbed.base.axes import SCHEDULERS, Taken
from testbed.base.errors import UsageError
from testbed.base.files import find_trace, write_atomically
from testbed.base.plan import encode_plan, load_plan
from testbed.base.units import format_seconds
from testbed.commands.checks import check_output, refuse_unused
from testbed.commands.simulate import scheduler_specs
from testbed.prediction.nominal import read_link
from testbed.records.text import aligned
from testbed.scheduling.for_framework import Fitted, fastest, fit, framework_of, plans_for


def plan(
    backend: Annotated[
        str, typer.Option("--for", help="the framework: ddp", metavar="BACKEND", show_default=False)
    ],
    file: Annotated[
        Path | None,
        typer.Argument(
            help="this plan (testbed.plan/1), instead of --scheduler", show_default=False
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(help="testbed.trace/1 file, or a shipped trace such as resnet50-v100"),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            help="testbed.link/1 file, as testbed comm --fit writes, or nominal numbers: "
            "rate=10gbit,latency=50us,workers=8"
        ),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            help="the fastest of these: name[:key=value,...],name,...",
            metavar="LIST",
            show_default="the framework's own schedule, and what auto tries in the backward pass",
        ),
    ] = None,
    plan_out: Annotated[
        Path | None, typer.Option(help="save what the framework carries out (testbed.plan/1)")
    ] = None,
) -> None:
    """Make a framework's own schedule do what a plan says, as far as it can.

    Prints the setting that makes stock PyTorch DDP build the buckets of a plan, for any plan that
    stays in the backward pass. Among several schedulers the one is chosen whose buckets are
    predicted to be fastest. Where limits of buckets alone cannot give the plan's messages, the
    nearest buckets are printed and called so. The saved file runs as `--backend ddp:plan=FILE`.
    As in reports, `rule` tells where a scheduler's rule comes from (published rule,
    reconstruction, ours) and `tuning` whether its settings are its defaults (untuned), were given
    (set by hand) or are among those that `auto` tries; `-`: it has none.

    Exit status: 0 fine, 2 asked for wrongly, or a plan that the framework cannot carry out.

    Examples:
        testbed plan --for ddp --trace resnet50-v100 --link link.json --plan-out ddp.json

        testbed plan --for ddp --trace trace.json --link link.json --scheduler mg-wfbp,optimal

        testbed plan plan.json --for ddp
    """
    own = framework_of(backend)
    if plan_out is not None:
        check_output("--plan-out", plan_out)
    if file is not None and scheduler is not None:
        raise UsageError(f"{file} is a finished plan; leave out --scheduler")
    if trace is None:
        refuse_unused(plan, locals(), ("link",), "without --trace")
    recorded = None if trace is None else find_trace(trace)
    measured = None if link is None else read_link(link, backend)
    specs = None if scheduler is None else scheduler_specs(scheduler)
    if file is not None:
        found = [fit(own, load_plan(file), recorded, measured)]
    elif recorded is not None and measured is not None:
        found = plans_for(own, recorded, measured, specs)
    else:
        raise UsageError("expected --trace and --link, or the file of a plan")
    best = fastest(found)
    assert best.taken is not None
    if plan_out is not None:
        write_atomically(plan_out, encode_plan(best.taken.plan))
    searched = file is None and specs is None
    sys.stdout.write(_text(own.name, own.like, found, best, best.taken, searched=searched))


def _text(
    name: str, stock: str, found: list[Fitted], best: Fitted, taken: Taken, *, searched: bool
) -> str:
    rows = [("plan", "rule", "tuning", "buckets", "as planned", "iteration")]
    for each in sorted((f for f in found if f.taken), key=lambda f: f.iteration_s or 0.0):
        assert each.taken is not None
        if each.scheduler == stock:
            marks = (f"{name} itself ({stock})", f"{name}'s", "untuned")
        else:
            marks = (each.scheduler, *_marks(each.scheduler, searched))
        as_planned = "nearest" if each.taken.differences else "yes"
        time = "-" if each.iteration_s is None else format_seconds(each.iteration_s)
        rows.append((*marks, str(len(each.taken.plan.messages)), as_planned, time))
    lines = [aligned(rows)]
    lines += [f"left out {each.scheduler}: {each.why}" for each in found if not each.taken]
    lines += [
        "",
        f"chosen: {best.scheduler}" + (f": {taken.plan.reason}" * bool(taken.plan.reason)),
    ]
    lines += [f"nearest only: {difference}" for difference in taken.differences]
    return "\n".join([*lines, taken.setting]) + "\n"


def _marks(scheduler: str, searched: bool) -> tuple[str, str]:
    """Where a scheduler's rule comes from and how its settings were chosen, as in reports.

    Args:
        scheduler: as a plan names it.
        searched: nobody gave it: it is one of the settings that `auto` tries.
    """
    part = SCHEDULERS.find(scheduler)
    if part is None:
        return "-", "-"
    tuning = part.tuning or "-"
    if searched and tuning == "set by hand":
        tuning = "one that auto tries"
    return part.origins or "-", tuning
