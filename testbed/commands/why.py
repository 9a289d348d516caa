"""`testbed why`: the cause of each exposed millisecond of a recorded run; needs no torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from testbed.base.axes import AXES, COMPRESSORS, WORKLOADS
from testbed.base.config import RunConfig
from testbed.base.errors import TestbedError, UsageError
from testbed.base.files import read_file, to_json
from testbed.base.link import Link
from testbed.base.plan import Plan
from testbed.base.trace import Trace
from testbed.base.units import format_seconds
from testbed.causes.advice import advise, schedulers
from testbed.causes.summary import Adviser, Why
from testbed.causes.summary import why as find_why
from testbed.launch.plan_options import parts_of, plan_for, why_whole
from testbed.records.cell import Cell, decode_cell
from testbed.records.store import timeline_of
from testbed.records.text import aligned
from testbed.records.timeline import SUFFIX, Timeline, decode_timeline, of_another_run, undilated
from testbed.sweeping.progress import last_line

MOST_TENSORS = 20


def why(
    cell: Annotated[
        Path,
        typer.Argument(
            help=f"record of a run with its *{SUFFIX} beside it, or that file itself",
            show_default=False,
        ),
    ],
    steps: Annotated[
        str | None,
        typer.Option(
            help="explain these only, held against the others: 20-32 or 20,21,25-30",
            show_default="all",
        ),
    ] = None,
    tensors: Annotated[
        int,
        typer.Option(min=0, help="how many tensors are shown, the most exposed ones; 0 = all"),
    ] = MOST_TENSORS,
    json: Annotated[
        bool, typer.Option("--json", help="as JSON (schema testbed.why/1) on stdout")
    ] = False,
) -> None:
    """Tell why communication was exposed: each millisecond with its cause, and what would help.

    Needs the events of a run: `testbed run --timeline`. Causes: late rank, busy host, order,
    codec, dependency, tiny messages, start-up, saturated link; what nobody can tell is said to be
    so. Advice is what the simulator says a change would gain.

    Exit status: 0 fine, 2 asked for wrongly.

    Examples:
        testbed why cell.json

        testbed why cell.timeline.json --steps 20-32

        testbed why cell.json --json
    """
    recorded, config = _load(cell)
    timeline = undilated(recorded)
    wanted = None if steps is None else parse_steps(steps)
    found = find_why(timeline, wanted, _adviser(timeline, config))
    if recorded.dilation != 1:
        slower = (
            f"times are the emulated cluster's; real ones are {recorded.dilation:g} times as long"
        )
        found = msgspec.structs.replace(found, notes=(*found.notes, slower))
    sys.stdout.write(to_json(found).decode() if json else text_of(found, tensors))


def parse_steps(text: str) -> tuple[int, ...]:
    """Steps given as numbers and ranges, both ends included.

    Raises:
        UsageError: it is neither.

    Example:
        >>> parse_steps("3,5-7")
        (3, 5, 6, 7)
    """
    found: dict[int, None] = {}
    try:
        for piece in text.split(","):
            first, dash, last = piece.partition("-")
            begin, end = int(first), int(last if dash else first)
            if not 0 <= begin <= end < begin + 10_000_000:
                raise ValueError(piece)
            found.update(dict.fromkeys(range(begin, end + 1)))
    except ValueError:
        raise UsageError(
            f"--steps is {text!r}; expected numbers and ranges of steps, as 20-32 or 20,25-30"
        ) from None
    return tuple(found)


def _load(path: Path) -> tuple[Timeline, RunConfig]:
    """The timeline, and the settings of its run; a timeline alone tells its backend only."""
    if path.is_dir():
        raise UsageError(
            f"{path} is a folder; expected the record of one run with its *{SUFFIX} beside it, as "
            "cells/KEY.json of a sweep with --timeline; name that file"
        )
    if path.name.endswith(SUFFIX):
        timeline = decode_timeline(read_file(path), str(path))
        return timeline, RunConfig(backend=timeline.backend)
    cell, beside = _finished(path), timeline_of(path)
    if not beside.exists():
        raise UsageError(
            f"{path} has no {beside.name} beside it; expected the record of a run with --timeline, "
            "or the timeline's own file; run again with --timeline"
        )
    timeline = decode_timeline(read_file(beside), str(beside))
    if differs := of_another_run(timeline, cell):
        raise UsageError(
            f"{beside} is of another run than {path} ({differs}); expected what the same run "
            f"wrote; run again with --timeline, or give {beside.name} alone"
        )
    return timeline, msgspec.structs.replace(cell.config, plan=None, tune=None)


def _finished(path: Path) -> Cell:
    """The record of a run that finished."""
    data = read_file(path)
    try:
        cell = decode_cell(data)
    except msgspec.DecodeError as error:
        raise UsageError(
            f"{path} is no record of a run ({error}); expected what `testbed run --json` or a "
            f"sweep wrote, or a *{SUFFIX}"
        ) from error
    if cell.status != "ok":
        reason = last_line(cell.error) or "no reason recorded"
        raise UsageError(
            f"the run of {path} failed ({reason}): there is nothing to explain; expected a run "
            "that finished; run it again with --timeline"
        )
    return cell


def _adviser(timeline: Timeline, config: RunConfig) -> Adviser:
    """What may be advised to this run: schedulers that it takes, planned as it would plan them."""
    specs: list[str] = []
    if COMPRESSORS.is_default(config):  # else none is advised, and asking would load torch
        specs = [s for s in schedulers(timeline.backend) if _is_possible(config, s)]

    def make(spec: str, trace: Trace, link: Link) -> Plan:
        return plan_for(msgspec.structs.replace(config, scheduler=spec), trace, link)

    whole = bool(why_whole(config))
    return lambda found: advise(timeline, found, specs, make, whole=whole)


def _is_possible(config: RunConfig, scheduler: str) -> bool:
    """Whether `testbed run` would take the scheduler in this run, where it ran.

    Its workload is not asked, nor what can be used here: the record may be another machine's.
    """
    axes = [axis for axis in AXES if axis is not WORKLOADS]
    try:
        parts_of(msgspec.structs.replace(config, scheduler=scheduler), axes, here=False)
    except TestbedError:
        return False
    return True


def text_of(found: Why, most_tensors: int = MOST_TENSORS) -> str:
    """The record for people, at most 100 columns."""
    first, last = found.steps[0], found.steps[-1]
    head = f"{found.backend} {found.scheduler}".strip()
    share = found.exposed_s / found.step_s if found.step_s > 0 else 0.0
    lines = [
        f"{head}, {found.num_workers} workers, steps {first} to {last} ({len(found.steps)})",
        f"exposed: {format_seconds(found.exposed_s)} of a step of {format_seconds(found.step_s)} "
        f"({share:.0%}); overlap {found.overlap:.0%} of communication; first cause: {found.first}",
    ]
    if found.usual_s is not None:
        lines.append(f"the other steps: {format_seconds(found.usual_s)} exposed")
    return (
        "\n".join(
            [*lines, "", _causes(found), "", _ranks(found), "", _tensors(found, most_tensors), ""]
            + _advice(found)
            + [f"note: {note}" for note in found.notes]
            + [
                "Exposed and wait-free times are means over steps, all others medians.",
                "Times of different ranks agree within "
                f"{format_seconds(found.clock_uncertainty_s)} (95 %)."
                * (found.clock_uncertainty_s > 0),
            ]
        ).rstrip()
        + "\n"
    )


def _causes(found: Why) -> str:
    more = ["more than usual"] if found.usual_s is not None else []
    rows: list[tuple[str, ...]] = [("cause", "exposed", "share", *more, "")]
    for row in found.causes:
        if abs(row.exposed_s) < 5e-7 and abs(row.more_s or 0.0) < 5e-7:
            continue
        share = row.exposed_s / found.exposed_s if found.exposed_s > 0 else 0.0
        more = [] if row.more_s is None else [_signed(row.more_s)]
        rows.append((row.cause, format_seconds(row.exposed_s), f"{share:.0%}", *more, row.note))
    rows.append(("sum", format_seconds(found.exposed_s), "100%", *[""] * (len(rows[0]) - 3)))
    return aligned(rows)


def _signed(seconds: float) -> str:
    return ("-" if seconds < 0 else "+") + format_seconds(abs(seconds))


def _ranks(found: Why) -> str:
    rows: list[tuple[str, ...]] = [
        ("rank", "computes", "exposed", "transferring", "in exchanges for others")
    ]
    rows += [
        (
            str(row.rank),
            *map(
                format_seconds,
                (row.own_s, row.exposed_s, row.transferring_s, max(0.0, row.waiting_s)),
            ),
        )
        for row in found.ranks
    ]
    return aligned(rows)


def _tensors(found: Why, most: int) -> str:
    shown = sorted(found.tensors, key=lambda row: -row.exposed_s)[: most or None]
    chosen = [row for row in found.tensors if row in shown]
    titles = (
        "tensor",
        "ready",
        "queued",
        "started",
        "ended",
        "wait-free",
        "exposed",
        "first cause",
    )
    rows: list[tuple[str, ...]] = [titles]
    for row in chosen:
        cause = max(row.causes, key=lambda c: row.causes[c], default="")
        moments = (row.ready_s, row.queued_s, row.started_s, row.ended_s, row.wait_free_s)
        name = row.name if len(row.name) <= 28 else "..." + row.name[-25:]
        rows.append((name, *map(format_seconds, (*moments, row.exposed_s)), cause))
    left = len(found.tensors) - len(chosen)
    return aligned(rows) + (f"\n{left} more tensors, less exposed: --tensors 0" if left else "")


def _advice(found: Why) -> list[str]:
    if not found.advice:
        return ["advice: none: no plan or no exchange is known, or it cannot be simulated"]
    step = format_seconds(found.step_s)
    return [
        f"advice: {a.change}: "
        + (
            f"{format_seconds(a.gain_s)} less of a step of {step}, simulated"
            if a.gain_s > 0
            else "nothing"
        )
        for a in found.advice
    ]
