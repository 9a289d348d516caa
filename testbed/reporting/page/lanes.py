"""Timelines as lanes: what every rank did in some steps, and above it what was predicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from testbed.base.axes import COMPRESSORS
from testbed.base.config import RunConfig
from testbed.base.errors import UsageError
from testbed.base.units import rounded
from testbed.prediction.cross_iteration import predict
from testbed.records.step_trace import computed_in, trace_of
from testbed.records.timeline import Timeline, in_lanes, process_of, undilated
from testbed.reporting.page.groups import Placed
from testbed.reporting.page.markup import Markup, data, element, section

MAX_EVENTS = 20_000  # of a page
MAX_EVENTS_EACH = 3_000
MAX_STEPS = 3
MAX_TIMELINES = 24
KINDS = ("compute", "send", "receive", "reduce", "encode", "decode", "wait", "update")
INSTANTS = ("ready", "queued")
ROW = 18  # pixels of a lane, as in page.css


@dataclass(frozen=True)
class Recorded:
    """A cell's timeline.

    Attributes:
        path: of its file.
        source: folder of the sweep.
        config: of the cell, its repeat left out.
        timeline: as it was read.
    """

    path: Path
    source: str
    config: RunConfig
    timeline: Timeline


@dataclass(frozen=True)
class Drawn:
    """What is drawn of a timeline; times are the emulated cluster's.

    Attributes:
        steps: that are shown.
        bars: lane, kind, begin, end and name of each.
        left_out: events of these steps that are not drawn.
        told: about the prediction, in words; empty: it is drawn.
    """

    steps: tuple[int, ...]
    bars: tuple[tuple[str, str, float, float, str], ...]
    left_out: int = 0
    told: str = ""


def timelines(cells: Sequence[Placed], found: Sequence[Recorded]) -> Markup:
    """A drawing for each cell of which a timeline is there, of its first run that has one."""
    own = {(each.cell.source, repr(each.cell.config)): each for each in cells}
    chosen: dict[int, tuple[Placed, Recorded]] = {}
    for recorded in found:
        each = own.get((recorded.source, repr(recorded.config)))
        if each is not None and recorded.timeline.events:  # else no step had room
            chosen.setdefault(each.number, (each, recorded))
    if not chosen:
        told = (
            "Nothing is recorded: run the sweep, or the command of a cell, with --timeline to see "
            "here what every rank did, under what was predicted."
        )
        return section("Timeline", element("p", told))
    shown = [pair for _, pair in sorted(chosen.items())][:MAX_TIMELINES]
    limit = min(MAX_EVENTS_EACH, MAX_EVENTS // len(shown))
    told = (
        "What every rank did, on rank 0's clock; above it what was predicted from the plan, the "
        "link and the moments at which the last rank's gradients were ready. Drag over a drawing "
        "to see a part of it larger; in the one that has the focus arrow keys go from event to "
        "event."
    )
    if len(chosen) > len(shown):
        told += f" {len(shown)} of {len(chosen)} timelines are drawn."
    return section("Timeline", element("p", told), _legend(), *(_figure(*s, limit) for s in shown))


def _legend() -> Markup:
    marks = [element("span", element("i", class_=f"k-{kind}"), kind) for kind in KINDS]
    return element("p", *marks, class_="parts")


def draw(timeline: Timeline, limit: int) -> Drawn:
    """As many of the last steps as fit into the limit, at least one.

    Where one step has too many events the longest are drawn.

    Example:
        >>> from testbed.records.timeline import TimelineEvent
        >>> event = TimelineEvent(kind="compute", name="a", rank=0, step=3, begin_s=0, end_s=1)
        >>> draw(Timeline(backend="gloo", num_workers=1, events=(event,)), 10).steps
        (3,)
    """
    steps = sorted({event.step for event in timeline.events})
    counts = [sum(event.step == step for event in timeline.events) for step in steps]
    fits = sum(total <= limit for total in accumulate(reversed(counts)))
    kept = set(steps[-min(max(1, fits), MAX_STEPS) :])
    events = [event for event in timeline.events if event.step in kept]
    drawn = sorted(events, key=lambda event: -event.duration_s)[:limit]
    factor = 1 / timeline.dilation
    begin_s = min((event.begin_s for event in drawn), default=0.0)
    bars = [
        (
            f"{process_of(timeline, event.rank)}, {lane}",
            event.kind,
            (event.begin_s - begin_s) * factor,
            (event.end_s - begin_s) * factor,
            event.name,
        )
        for event, lane in in_lanes(msgspec.structs.replace(timeline, events=tuple(drawn)))
        if event.kind != "step"
    ]
    predicted: list[tuple[str, str, float, float, str]] = []
    told = ""
    try:
        for step in sorted(kept):
            predicted += _predicted(timeline, step, begin_s)
    except UsageError as error:
        told = f"Not predicted: {error}."
    order = sorted(bars, key=lambda bar: _natural(bar[0]))
    return Drawn(tuple(sorted(kept)), (*predicted, *order), len(events) - len(drawn), told)


def _natural(lane: str) -> tuple[object, ...]:
    """Ranks before servers, by number; compute first."""
    process, _, rest = lane.partition(", ")
    kind, _, number = process.partition(" ")
    return kind, int(number), not rest.startswith("compute"), rest


def _predicted(
    timeline: Timeline, step: int, begin_s: float
) -> Iterator[tuple[str, str, float, float, str]]:
    """Bars of what the model says of a step, from the moments at which gradients were ready."""
    plan, link = timeline.plan, timeline.link
    if timeline.compressor not in ("", COMPRESSORS.default):
        raise UsageError(f"the model's lane is of whole gradients, not of {timeline.compressor}'s")
    if plan is None or link is None:
        raise UsageError(
            "the timeline holds no plan and link; copy the cell's command below and run it with "
            "--predict --timeline FILE (of a sweep's TOML file: predict = true)"
        )
    (computed,) = computed_in(timeline, [step], range(timeline.num_workers))
    factor = 1 / timeline.dilation
    found = predict(plan, trace_of(plan, [computed]).stretched(factor), link)
    turn_s = (computed.turn_s - begin_s) * factor
    yield "predicted, compute", "compute", turn_s - found.forward_s, turn_s, "forward"
    yield "predicted, compute", "compute", turn_s, turn_s + found.backward_s, "backward"
    for span in found.spans:
        name = plan.names[span.tensors[0]] + (" ..." if len(set(span.tensors)) > 1 else "")
        lane = f"predicted, channel {span.channel}"
        yield lane, "send", turn_s + span.start_s, turn_s + span.end_s, name


def _figure(each: Placed, recorded: Recorded, limit: int) -> Markup:
    timeline = undilated(recorded.timeline)
    drawn = draw(timeline, limit)
    lanes = list(dict.fromkeys(bar[0] for bar in drawn.bars))
    names = list(dict.fromkeys(bar[4] for bar in drawn.bars))
    places = {lane: number for number, lane in enumerate(lanes)}
    numbers = {name: number for number, name in enumerate(names)}
    kinds = (*KINDS, *INSTANTS)
    raw: dict[str, Any] = {
        "lanes": len(lanes),
        "names": names,
        "kinds": kinds,
        # microseconds
        "bars": [
            [
                places[lane],
                kinds.index(kind),
                round(begin * 1e6, 1),
                round(end * 1e6, 1),
                numbers[n],
            ]
            for lane, kind, begin, end, n in drawn.bars
        ],
    }
    label = f"timeline of {each.name}, arrow keys go from event to event: {', '.join(lanes)}"
    buttons = [
        element("button", text, type="button", data_zoom=what)
        for what, text in (
            ("in", "Larger"),
            ("out", "Smaller"),
            ("left", "Earlier"),
            ("right", "Later"),
            ("all", "Whole"),
        )
    ]
    return element(
        "figure",
        element(
            "figcaption", f"{each.cell.workload}, {each.name}, {each.cell.num_workers} workers"
        ),
        element("p", _about(recorded, drawn, timeline), class_="told"),
        element("div", *buttons, element("output", aria_live="polite"), class_="tools"),
        element(
            "div",
            element("div", *(element("div", lane) for lane in lanes), class_="labels"),
            element(
                "canvas",
                role="application",
                aria_label=label,
                tabindex=0,
                height=22 + ROW * len(lanes),
            ),
            class_="lanes",
        ),
        data(raw, class_="bars"),
        class_="timeline",
        data_cell=each.number,
    )


def _about(recorded: Recorded, drawn: Drawn, timeline: Timeline) -> str:
    steps = " to ".join(dict.fromkeys([str(drawn.steps[0]), str(drawn.steps[-1])]))
    told = [f"Step{'s' * (len(drawn.steps) > 1)} {steps}."]
    if drawn.left_out:
        told.append(f"{drawn.left_out} of the shortest events are not drawn.")
    if timeline.dropped:
        told.append(f"{timeline.dropped} events found no room while recording.")
    if timeline.clocks:
        worst = max(clock.uncertainty_s for clock in timeline.clocks)
        told.append(f"Clocks agree within {rounded(worst * 1e3)} ms (95 %).")
    told.append(f"All of it, for Perfetto or speedscope: {recorded.path.name}.")
    return " ".join([*told, drawn.told]).strip()
