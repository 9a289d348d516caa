"""From what every rank and server recorded to one timeline on rank 0's clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from itertools import chain
from typing import Final

import msgspec

from testbed.backends.protocol import Group
from testbed.base.link import Link
from testbed.base.recorder import Asked, Raw, Recorder, Shown, event_cost_s, shown_events
from testbed.base.units import format_seconds
from testbed.control.clocks import ClockBursts
from testbed.control.protocol import hand_to_first
from testbed.launch.plan_options import why_whole
from testbed.records.cell import Cell
from testbed.records.timeline import ClockLine, Timeline, TimelineEvent
from testbed.statistics.clock_line import FittedClock, fit_clock
from testbed.training.exchange.buckets import describe_messages
from testbed.training.summary import Outcome

TOPIC: Final = "timeline"
HAND_IN_S: Final = 600.0  # of rank 0 reading what all have recorded


class Recorded(msgspec.Struct, array_like=True):
    """What one rank or server hands in.

    Attributes:
        rank: worker, or `num_workers` + number of the server.
        events: on its own clock.
        bursts: likewise; see `Recorder`, as are the others.
    """

    rank: int
    events: list[Raw]
    bursts: list[Asked]
    cores_used: dict[int, tuple[float, float, float]] = {}
    awaited: dict[int, float] = {}
    dropped: int = 0
    full_in: int | None = None
    event_cost_s: float = 0.0


def clock_of(group: Group) -> AbstractContextManager[object]:
    """Around what a member is to record: its clock is compared with rank 0's."""
    if group.recorder is None:
        return nullcontext()
    return ClockBursts(group.control, group.recorder)


def hand_in(group: Group, shown: Shown) -> list[Recorded]:
    """Bring what everybody recorded to rank 0; collective over all members.

    A server beside a rank reads the clock of the same machine.

    Args:
        group: with this member's recorder.
        shown: what this member's clock shows.

    Returns:
        All of it on rank 0, nothing elsewhere.

    Raises:
        RankLost, DeadlineExceeded: see `Control.all_gather`.
    """
    control, recorder = group.control, group.recorder
    assert recorder is not None
    bursts = [(shown(asked), there, shown(came)) for asked, there, came in recorder.bursts]
    cost_s = event_cost_s()
    beside = [(group.size + index, each) for index, each in recorder.beside.items()]
    mine = [
        Recorded(
            rank,
            shown_events(each.events, shown),
            bursts,
            each.cores_used,
            each.awaited,
            each.dropped,
            each.full_in,
            cost_s,
        )
        for rank, each in [(group.rank, recorder), *beside]
    ]
    handed_in = hand_to_first(control, TOPIC, msgspec.msgpack.encode(mine), HAND_IN_S, control.size)
    everything = [msgspec.msgpack.decode(each, type=list[Recorded]) for each in handed_in]
    return sorted(chain.from_iterable(everything), key=lambda recorded: recorded.rank)


def make_timeline(
    cell: Cell,
    recorded: Sequence[Recorded],
    outcomes: Sequence[Outcome],
    recorder: Recorder,
    link: Link | None,
    dilation: float,
) -> Timeline:
    """The timeline of a run; of the steps that every worker recorded from begin to end.

    Args:
        cell: of the run.
        recorded: by all ranks and servers.
        outcomes: of all workers, in rank order.
        recorder: rank 0's.
        link: that was planned with.
        dilation: see `Timeline`.
    """
    num_workers = len(outcomes)
    workers = [each for each in recorded if each.rank < num_workers]
    begun = [{e[2]: e[3] for e in each.events if e[0] == "step"} for each in workers]
    full = min((each.full_in for each in workers if each.full_in is not None), default=None)
    steps = sorted(
        step for step in set(begun[0]).intersection(*begun[1:]) if full is None or step < full
    )
    zero_s = begun[0][steps[0]] if steps else 0.0
    plan = recorder.plan
    numbers = {} if plan is None else {k: n for n, k in enumerate(describe_messages(plan))}
    if plan is not None and why_whole(cell.config):  # what was done, not what the plan allows
        plan = msgspec.structs.replace(plan, crosses_iteration=False)
    lines = {each.rank: _line(each) for each in recorded}
    wanted = set(steps)
    events = [
        _event(raw, each.rank, numbers, lines[each.rank], zero_s)
        for each in recorded
        for raw in each.events
        if raw[2] in wanted
    ]
    return Timeline(
        backend=cell.backend,
        scheduler=cell.scheduler,
        compressor=cell.config.compressor,
        workload=cell.workload,
        num_workers=num_workers,
        num_servers=sum(each.rank >= num_workers for each in recorded),
        events=tuple(sorted(events, key=lambda e: (e.begin_s, -e.end_s))),
        clocks=tuple(ClockLine(rank=r, **asdict(c)) for r, c in lines.items() if r != 0),
        plan=plan,
        link=link,
        exposed_s=_by_step(steps, recorder.first_step, [o.exposed_s for o in outcomes]),
        cores_used=_cores_used(steps, workers),
        cores_awaited={
            step: [each.awaited[step] for each in workers]
            for step in steps
            if all(step in each.awaited for each in workers)
        },
        dilation=dilation,
        event_cost_s=max(each.event_cost_s for each in recorded),
        dropped=sum(each.dropped for each in recorded),
        zero_s=zero_s,
        environment=cell.environment,
        consistency=cell.consistency,
        device=cell.config.device,
    )


def _cores_used(
    steps: Sequence[int], workers: Sequence[Recorded]
) -> dict[int, list[tuple[float, float, float]]]:
    """Readings divided evenly among the steps that they cover; steps after the last have none."""
    found: dict[int, list[tuple[float, float, float]]] = {step: [] for step in steps}
    for each in workers:
        used = dict.fromkeys(steps, (0.0, 0.0, 0.0))
        covered: list[int] = []
        for step in steps:
            covered.append(step)
            if step in each.cores_used:
                busy_s, own_s, whole_s = (s / len(covered) for s in each.cores_used[step])
                used.update(dict.fromkeys(covered, (busy_s, own_s, whole_s)))
                covered = []
        for step in steps:
            found[step].append(used[step])
    return found


def _line(recorded: Recorded) -> FittedClock:
    """How a member's clock is turned into rank 0's, which asks nobody, nor what runs beside it."""
    if not recorded.bursts or not recorded.events:
        return FittedClock()
    window_s = (min(e[3] for e in recorded.events), max(e[4] for e in recorded.events))
    return fit_clock(recorded.bursts, window_s)


def _event(
    raw: Raw, rank: int, numbers: Mapping[str, int], line: FittedClock, zero_s: float
) -> TimelineEvent:
    kind, name, step, begin_s, end_s, channel, num_bytes, peer, half, message = raw
    if message < 0 and kind not in ("step", "compute", "ready", "update"):
        message = numbers.get(name.partition(" (round ")[0], -1)
    return TimelineEvent(
        kind=kind,  # type: ignore[arg-type]
        name=name,
        rank=rank,
        step=step,
        begin_s=line.aligned(begin_s) - zero_s,
        end_s=line.aligned(end_s) - zero_s,
        message=message,
        channel=channel,
        num_bytes=num_bytes,
        peer=peer,
        half=half,
    )


def _by_step(
    steps: Sequence[int], first: int, ranks: Sequence[Sequence[float]]
) -> dict[int, list[float]]:
    """By step, for each rank its value; `ranks` begin with step `first`."""
    return {step: [values[step - first] for values in ranks] for step in steps}


def describe_timeline(timeline: Timeline) -> str:
    """What was recorded, and how well clocks agree, in a line.

    Example:
        >>> clock = ClockLine(rank=1, uncertainty_s=2e-5, num_bursts=12)
        >>> describe_timeline(Timeline(backend="gloo", num_workers=2, events=(), clocks=(clock,),
        ...                            exposed_s={5: [0, 0], 6: [0, 0]}, dropped=7))
        'steps 5 .. 6 of 2 ranks; clocks agree within 20 us (95 %); 7 events found no room'
    """
    steps = sorted(timeline.exposed_s)
    told = [
        f"steps {steps[0]} .. {steps[-1]} of {timeline.num_workers} ranks" if steps else "no step"
    ]
    if timeline.clocks:
        off_s = max(clock.uncertainty_s for clock in timeline.clocks)
        told.append(f"clocks agree within {format_seconds(off_s)} (95 %)")
    if timeline.dropped:
        told.append(f"{timeline.dropped} events found no room")
    return "; ".join(told)
