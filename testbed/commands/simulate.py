"""`testbed simulate`: plan and predicted timeline; nothing is executed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from testbed.errors import UsageError
from testbed.records.store import write_atomically
from testbed.spec import split_specs

if TYPE_CHECKING:
    from testbed.prediction.link import Link
    from testbed.prediction.timeline import Timeline
    from testbed.prediction.trace import Trace
    from testbed.records.simulation import SimulationResult
    from testbed.scheduling.plan import Plan

ALL: Final = (
    "sequential",
    "wfbp",
    "bucket",
    "cycle",
    "mg-wfbp",
    "asc-wfbp",
    "optimal",
    "pace",
    "osf",
    "bytescheduler",
    "p3",
    "dear",
)


def simulate(
    trace: Annotated[Path, typer.Option(help="testbed.trace/1 file, as testbed profile writes")],
    link: Annotated[Path, typer.Option(help="testbed.link/1 file, as testbed comm --fit writes")],
    scheduler: Annotated[
        str, typer.Option(help="name[:key=value,...],name,...; all = the twelve without auto")
    ] = "all",
    json: Annotated[
        str | None,
        typer.Option(help="write the results (schema testbed.simulation/1) here; - = to stdout"),
    ] = None,
    plan_out: Annotated[
        Path | None,
        typer.Option(
            help="save the plan (schema testbed.plan/1); several: one file each, named after it"
        ),
    ] = None,
) -> None:
    """Predict what schedulers do with a recorded model on a measured link, without running any.

    Prints a table, the fastest first, and each timeline. A message of dear appears as its two
    halves, the fold behind backward and the spread before the next forward.

    Exit status: 0 fine, 2 asked for wrongly.

    Examples:
        testbed simulate --trace trace.json --link link.json

        testbed simulate --trace trace.json --link link.json \
--scheduler mg-wfbp,bucket:mib=4,first_mib=1,pace --json simulation.json

        testbed simulate --trace trace.json --link link.json --scheduler auto --plan-out plan.json
    """
    from testbed.prediction.files import load_link, load_trace
    from testbed.records.simulation import Simulation, SimulationResult, encode_simulation

    specs = scheduler_specs(scheduler)
    outcomes = _simulated(specs, load_trace(trace), load_link(link))
    results = tuple(SimulationResult.of(s, t) for s, (_, t) in zip(specs, outcomes, strict=True))
    if plan_out is not None:
        _save_plans(plan_out, specs, [plan for plan, _ in outcomes])
    encoded = encode_simulation(Simulation(results=results))
    if json == "-":
        sys.stdout.write(encoded.decode())
        return
    if json is not None:
        write_atomically(Path(json), encoded)
    sys.stdout.write(_text(results, outcomes))


def scheduler_specs(text: str) -> tuple[str, ...]:
    """The schedulers that a comma-separated list names; `all` stands for the twelve.

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
        specs.update(dict.fromkeys(ALL if name == "all" else (name,)))
    return tuple(specs)


def _simulated(specs: tuple[str, ...], trace: Trace, link: Link) -> list[tuple[Plan, Timeline]]:
    """Each scheduler's plan and timeline."""
    from testbed.prediction.crossing import predict
    from testbed.scheduling.protocol import make_plan

    plans = [make_plan(spec, trace, link) for spec in specs]
    return [(plan, predict(plan, trace, link)) for plan in plans]


def _save_plans(path: Path, specs: tuple[str, ...], plans: list[Plan]) -> None:
    from testbed.scheduling.plan_file import encode_plan

    for spec, plan in zip(specs, plans, strict=True):
        target = path if len(plans) == 1 else path.with_stem(f"{path.stem}-{_file_name(spec)}")
        write_atomically(target, encode_plan(plan))


def _file_name(spec: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in spec)


def _text(results: tuple[SimulationResult, ...], outcomes: list[tuple[Plan, Timeline]]) -> str:
    """The table and the drawings, both fastest first."""
    from testbed.records.simulation import simulation_table
    from testbed.scheduling.show import draw

    parts = [simulation_table(results)]
    for index in sorted(range(len(results)), key=lambda i: results[i].iteration_s):
        plan, predicted = outcomes[index]
        head = results[index].scheduler + (f": {plan.reason}" if plan.reason else "")
        parts.append(f"{head}\n{draw(predicted)}")
    return "\n\n".join(parts) + "\n"
