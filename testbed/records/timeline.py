"""`testbed.timeline/1`: what every rank did in the measured steps, in one Chrome-trace JSON file.

The file opens in Perfetto and in speedscope as it is: rank = process, lane = thread. What these do
not show (the plan, the link, how well clocks agree) stands under `otherData`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal

import msgspec

from testbed.base.axes import BACKENDS
from testbed.base.errors import UsageError
from testbed.base.link import Link
from testbed.base.plan import Plan, to_builtins
from testbed.records.cell import Cell

TIMELINE_SCHEMA: Final = "testbed.timeline/1"
SUFFIX: Final = ".timeline.json"  # of the file beside a cell's

Kind = Literal[
    "step",
    "compute",
    "ready",
    "queued",
    "encode",
    "send",
    "receive",
    "reduce",
    "decode",
    "wait",
    "update",
]


# What is told of messages, and what it is where there is nothing to tell.
_OF_MESSAGES: Final = {"message": -1, "channel": -1, "num_bytes": 0, "peer": -1, "half": ""}


class TimelineEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that one rank did.

    Attributes:
        kind: `step`: a whole step, from its begin to its end. `compute`: a layer's forward or
            backward, or the whole of either. `ready` (an instant): a gradient is final. `queued`
            (an instant): a message was handed to the backend. `encode`, `decode`: a compressor, or
            packing and unpacking. `send`: a message's exchange, from its start on the channel to
            its end; `receive`, `reduce`: its parts where the backend can tell them apart. `wait`:
            the computing thread stood still for a message. `update`: the optimizer.
        name: of the layer (with ` forward` or ` backward`), the tensor, or the message.
        rank: worker, or `num_workers` + number of the server.
        step: of the run.
        begin_s: on rank 0's clock, seconds since the first recorded step began there.
        end_s: likewise; of an instant its `begin_s`.
        message: number in the plan; -1: of no message, or of several.
        channel: on which the message travels; -1: none.
        num_bytes: that were moved; 0: none, or not known.
        peer: rank or server on the other side; -1: all, or not known.
        half: `fold` or `spread` where the exchange is one of two halves.
    """

    kind: Kind
    name: str
    rank: int
    step: int
    begin_s: float
    end_s: float
    message: int = -1
    channel: int = -1
    num_bytes: int = 0
    peer: int = -1
    half: str = ""

    @property
    def duration_s(self) -> float:
        """Seconds from begin to end."""
        return self.end_s - self.begin_s


class ClockLine(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank's clock is turned into rank 0's: t - offset_s - drift (t - at_s).

    Attributes:
        rank: whose clock.
        offset_s: by which it was ahead of rank 0's at `at_s`.
        drift: seconds that it gains a second.
        at_s: on the rank's own clock.
        uncertainty_s: half width of a 95 % interval of the offset within the recorded steps.
        num_bursts: timed exchanges that the line was fitted to.
    """

    rank: int
    offset_s: float = 0.0
    drift: float = 0.0
    at_s: float = 0.0
    uncertainty_s: float = 0.0
    num_bursts: int = 0


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """All recorded events of a run, on rank 0's clock.

    Attributes:
        backend: specification, as are scheduler, compressor and workload.
        num_workers: training ranks.
        num_servers: parameter servers, dedicated or colocated; 0: none.
        events: in order of begin.
        clocks: of each rank that is not rank 0.
        plan: that was executed; None: an external framework's own.
        link: that it was planned or predicted with; None: none.
        exposed_s: step -> for each rank what its session counted as exposed (`StepReport`).
        cores_used: step -> for each rank three times of its cores: executing anything or stolen by
            the host, of that the run's own processes, and all; a reading is divided evenly among
            the steps since the one before, 0 in steps after the last.
        cores_awaited: step -> for each rank the share of it in which its computing thread could run
            and no core was free for it, whoever had them; empty: the system does not tell.
        dilation: how many times slower than on the emulated cluster everything happened.
        event_cost_s: what recording one event took, measured after the training.
        dropped: events that found no room; steps in which a worker's did are left out.
        zero_s: what rank 0's clock showed when the first recorded step began there.
        environment: versions and machine, as in the cell.
        consistency: of the backend, as in the cell.
        device: that computed, as in the configuration.
    """

    backend: str
    num_workers: int
    events: tuple[TimelineEvent, ...]
    scheduler: str = ""
    compressor: str = ""
    workload: str = ""
    num_servers: int = 0
    clocks: tuple[ClockLine, ...] = ()
    plan: Plan | None = None
    link: Link | None = None
    exposed_s: dict[int, list[float]] = {}
    cores_used: dict[int, list[tuple[float, float, float]]] = {}
    cores_awaited: dict[int, list[float]] = {}
    dilation: float = 1.0
    event_cost_s: float = 0.0
    dropped: int = 0
    zero_s: float = 0.0
    environment: dict[str, Any] = {}
    consistency: str = "bsp"
    device: str = "cpu"


def undilated(timeline: Timeline) -> Timeline:
    """The timeline in the times of the cluster that was emulated: all divided by the dilation.

    Clocks keep what turns them into rank 0's; of them the uncertainty alone is a time that counts.

    Example:
        >>> step = TimelineEvent(kind="step", name="0", rank=0, step=0, begin_s=1.0, end_s=3.0)
        >>> slow = Timeline(backend="gloo", num_workers=1, events=(step,), dilation=4.0)
        >>> undilated(slow).events[0].duration_s, undilated(slow).dilation
        (0.5, 1.0)
    """
    if timeline.dilation == 1:
        return timeline
    by = timeline.dilation
    replace = msgspec.structs.replace
    return replace(
        timeline,
        events=tuple(
            replace(event, begin_s=event.begin_s / by, end_s=event.end_s / by)
            for event in timeline.events
        ),
        clocks=tuple(replace(c, uncertainty_s=c.uncertainty_s / by) for c in timeline.clocks),
        exposed_s={step: [s / by for s in of] for step, of in timeline.exposed_s.items()},
        event_cost_s=timeline.event_cost_s / by,
        dilation=1.0,
    )


def lane_of(event: TimelineEvent) -> str:
    """The lane that an event is drawn in.

    Example:
        >>> lane_of(TimelineEvent(kind="send", name="m0", rank=0, step=5, begin_s=0, end_s=1,
        ...                       channel=2))
        'communication 2'
    """
    match event.kind:
        case "step":
            return "steps"
        case "send" | "receive" | "reduce" | "queued":
            return f"communication {max(event.channel, 0)}"
        case "encode" | "decode":
            return event.kind
        case _:
            return "compute"


def in_lanes(timeline: Timeline) -> Iterator[tuple[TimelineEvent, str]]:
    """Each event with its lane; a lane gets a second row where two events overlap in part.

    Events in one lane and row nest or lie apart, as viewers of traces expect.
    """
    rows: dict[tuple[int, str], list[list[float]]] = {}  # of each row the ends of what is open
    for event in sorted(timeline.events, key=lambda e: (e.begin_s, -e.end_s)):
        lane = lane_of(event) if event.rank < timeline.num_workers else "server"
        found = rows.setdefault((event.rank, lane), [])
        for ends in found:
            while ends and ends[-1] <= event.begin_s:
                ends.pop()
        fits = (row for row, ends in enumerate(found) if not ends or ends[-1] >= event.end_s)
        row = next(fits, len(found))
        if row == len(found):
            found.append([])
        found[row].append(event.end_s)
        yield event, lane if row == 0 else f"{lane} ({row + 1})"


def encode_timeline(timeline: Timeline) -> bytes:
    """The timeline as Chrome-trace JSON: times in microseconds, lanes named by metadata events.

    Beside the keys of the format each event has those of `TimelineEvent`. Its `args` hold bytes
    alone: speedscope takes them for a part of the name, and adds up what has the same name.
    """
    threads: dict[tuple[int, str], int] = {}
    drawn: list[dict[str, Any]] = []
    for event, lane in in_lanes(timeline):
        thread = threads.setdefault((event.rank, lane), len(threads))
        begin_us, end_us = _microseconds(event.begin_s), _microseconds(event.end_s)
        told = {n: v for n, none in _OF_MESSAGES.items() if (v := getattr(event, n)) != none}
        drawn.append(
            {
                "ph": "X",
                "cat": event.kind,
                "name": _title(event.kind) + event.name,
                "pid": event.rank,
                "tid": thread,
                "ts": begin_us,
                "dur": end_us - begin_us,
                "step": event.step,
                **told,
            }
        )
        if event.kind == "send":
            drawn[-1]["args"] = {"num_bytes": event.num_bytes}
    named = [
        {
            "ph": "M",
            "name": "process_name",
            "pid": rank,
            "args": {"name": process_of(timeline, rank)},
        }
        for rank in sorted({rank for rank, _ in threads})
    ]
    named += [
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": lane}}
        for (rank, lane), thread in threads.items()
    ]
    about = msgspec.to_builtins(msgspec.structs.replace(timeline, events=(), plan=None))
    del about["events"]
    if timeline.plan is not None:
        about["plan"] = to_builtins(timeline.plan)
    raw = {"displayTimeUnit": "ms", "otherData": {"schema": TIMELINE_SCHEMA, **about}}
    return msgspec.json.encode({**raw, "traceEvents": [*named, *drawn]}) + b"\n"


def decode_timeline(data: bytes, where: str = "timeline") -> Timeline:
    """A timeline from its file; the inverse of `encode_timeline`.

    Raises:
        UsageError: no JSON, no timeline of this schema, or a key is wrong; names the source.
    """
    try:
        raw = msgspec.json.decode(data)
        about = raw["otherData"]
        schema = about.pop("schema")
        if schema != TIMELINE_SCHEMA:
            raise UsageError(f"{where}: schema is {schema!r}; expected {TIMELINE_SCHEMA!r}")
        events = [_read(event) for event in raw["traceEvents"] if event["ph"] == "X"]
        # JSON has keys of text alone: strict=False reads the steps' numbers out of them
        return msgspec.convert({**about, "events": events}, Timeline, strict=False)
    except (msgspec.MsgspecError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{where} is no timeline ({error}); expected a file that `testbed run --timeline` wrote"
        ) from error


def _microseconds(time_s: float) -> float:
    """As a multiple of 1/64: a viewer's sum of begin and duration is the end, to the last digit."""
    return round(time_s * 64e6) / 64


def _read(drawn: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": drawn["cat"],
        "name": drawn["name"].removeprefix(_title(drawn["cat"])),
        "rank": drawn["pid"],
        "step": drawn["step"],
        "begin_s": drawn["ts"] / 1e6,
        "end_s": (drawn["ts"] + drawn["dur"]) / 1e6,
        **{name: drawn[name] for name in _OF_MESSAGES if name in drawn},
    }


def _title(kind: str) -> str:
    """What viewers show before an event's name, where that does not tell what it is."""
    return "" if kind in ("step", "compute", "update") else f"{kind} "


def process_of(timeline: Timeline, rank: int) -> str:
    """What a rank or server is called, as `server 0`."""
    servers = rank - timeline.num_workers
    return f"rank {rank}" if servers < 0 else f"server {servers}"


def of_another_run(timeline: Timeline, cell: Cell) -> str:
    """What shows that a timeline and a cell are of two runs, in words; empty: nothing does.

    What one of them does not tell is not compared. Nor are plans: one that sizes alone decide is
    made anew after the first step, and the cell has the digest of the first.
    """
    told = {
        "began": (cell.environment.get("began"), timeline.environment.get("began")),
        "backend": (BACKENDS.today(cell.backend), BACKENDS.today(timeline.backend)),
        "scheduler": (cell.scheduler, timeline.scheduler),
        "compressor": (cell.config.compressor, timeline.compressor),
        "workers": (cell.num_workers, timeline.num_workers),
    }
    differ = {what: pair for what, pair in told.items() if all(pair) and pair[0] != pair[1]}
    return ", ".join(f"{what} {a} in the cell, {b} there" for what, (a, b) in differ.items())
