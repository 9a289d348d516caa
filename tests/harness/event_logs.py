"""Timelines of all ranks, made by the simulator with one known cause of exposed time in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

import msgspec
import numpy as np

from testbed.base.link import Link
from testbed.base.plan import Message, Plan
from testbed.base.trace import Trace, TraceTensor
from testbed.prediction.cross_iteration import prioritised_s
from testbed.prediction.timeline import concurrent_s, message_bytes, serial_s
from testbed.records.timeline import ClockLine, Kind, Timeline, TimelineEvent
from testbed.scheduling.protocol import make_plan

Planted = Literal[
    "late rank",
    "busy host",
    "order",
    "codec",
    "dependency",
    "tiny messages",
    "start-up",
    "saturated link",
]
PLANTED: tuple[Planted, ...] = (
    "late rank",
    "busy host",
    "order",
    "codec",
    "dependency",
    "tiny messages",
    "start-up",
    "saturated link",
)
TOGGLED: tuple[Planted, ...] = ("late rank", "busy host", "start-up", "saturated link")
FIRST_STEP = 5
CORES = 16


@dataclass
class Log:
    """A timeline with what was planted in it.

    Attributes:
        timeline: as a recorder would have written it.
        window: steps in which a toggled cause was on; None: in all.
        rank: late or busy.
    """

    timeline: Timeline
    window: list[int] | None
    rank: int


@dataclass
class Setting:
    """What a log is made from; times in seconds.

    Attributes:
        votes: ranks tell each other after all waits which parameters they have used.
        packs: gradients are copied into their message when they are final.
    """

    trace: Trace
    plan: Plan
    link: Link
    num_workers: int
    noise: float
    window: list[int] | None
    causes: frozenset[str]
    rank: int
    late_s: float = 0.0
    startup_factor: float = 1.0
    byte_factor: float = 1.0
    compute_factor: float = 1.0
    taken: float = 0.0
    encode_s: float = 0.0
    crosses: bool = False
    votes: bool = False
    packs: bool = False
    events: list[TimelineEvent] = field(default_factory=list)


def make_log(planted: Planted | None, seed: int, also: Planted | None = None) -> Log:
    """A log with this cause in it, None: with none; the same for the same seed.

    Args:
        planted: the cause.
        seed: of everything that is drawn.
        also: a second, smaller cause.
    """
    draw = np.random.default_rng([seed, *(planted or "none").encode()])
    causes = frozenset(c for c in (planted, also) if c)
    is_tiny = "tiny messages" in causes
    num_tensors = int(draw.integers(60, 140) if is_tiny else draw.integers(6, 24))
    backward_s = float(draw.uniform(0.02, 0.1))
    weights = draw.lognormal(0.0, 0.2 if is_tiny else 1.0, num_tensors)
    elements = np.maximum(64, weights / weights.sum() * draw.uniform(2e5, 2e7)).astype(int)
    pace = draw.uniform(0.5, 1.5, num_tensors)
    pace *= backward_s / pace.sum()
    tensors = tuple(
        TraceTensor(
            name=f"layer{i}.weight",
            num_elements=int(elements[i]),
            forward_s=float(pace[i]) / 2,
            backward_s=float(pace[i]),
        )
        for i in range(num_tensors)
    )
    trace = Trace(name="drawn", device="cpu", batch_size=8, tensors=tensors)
    num_workers = int(draw.choice([2, 3, 4, 8]))
    busy = draw.uniform(0.2, 0.55) * backward_s  # bytes and start-ups of a step without fault
    starts = draw.uniform(0.03, 0.12) * backward_s
    if is_tiny:
        starts, busy = draw.uniform(1.3, 2.5) * backward_s, draw.uniform(0.05, 0.3) * backward_s
    toggles = planted in TOGGLED and draw.random() < 0.6
    if planted == "saturated link" and not toggles and draw.random() < 0.5:
        busy *= draw.uniform(4, 8)
    backend = str(draw.choice(["mpi-ring", "zmq-ps", "gloo"]))
    link = Link(
        backend=backend,
        num_workers=num_workers,
        latency_s=starts / num_tensors,
        seconds_per_byte=busy / trace.num_bytes,
    )
    plan = _plan(planted, trace, link, draw)
    num_steps = 40 if toggles else 10 if is_tiny else 16
    steps = list(range(FIRST_STEP, FIRST_STEP + num_steps))
    first = int(draw.integers(8, 20))
    window = steps[first : first + int(draw.integers(12, 18))] if toggles else None
    setting = Setting(
        trace=trace,
        plan=plan,
        link=link,
        num_workers=num_workers,
        noise=float(draw.uniform(0.01, 0.04)),
        window=window,
        causes=causes,
        rank=int(draw.integers(num_workers)),
        crosses=plan.crosses_iteration,
    )
    drawn = np.random.default_rng([seed, len(PLANTED)])  # its own: all else is drawn as without
    setting.votes = not plan.crosses_iteration and bool(drawn.random() < 0.5)
    setting.packs = bool(drawn.random() < 0.5)
    weak = 0.35 if also else 1.0
    if "late rank" in causes:
        setting.late_s = float(draw.uniform(0.5, 1.2)) * backward_s
        setting.late_s *= weak if also == "late rank" else 1
    if "start-up" in causes:
        startups_s = link.latency_s * len(plan.messages)
        setting.startup_factor = float(draw.uniform(1.5, 3)) * backward_s / startups_s
    if "saturated link" in causes and busy < backward_s:
        setting.byte_factor = float(draw.uniform(1.6, 3)) * backward_s / busy
    if "busy host" in causes:
        setting.compute_factor = float(draw.uniform(1.4, 2.0))
        setting.taken = float(draw.uniform(0.25, 0.5))
    if "codec" in causes:
        setting.encode_s = float(draw.uniform(1.5, 2.5)) * backward_s / len(plan.messages)
    return Log(_run(setting, steps, draw), window, setting.rank)


def _plan(planted: Planted | None, trace: Trace, link: Link, draw: np.random.Generator) -> Plan:
    mib = trace.num_bytes / 2**20
    if planted == "dependency":
        spec = str(draw.choice(["sequential", f"bucket:mib={2 * mib:g},first_mib={2 * mib:g}"]))
        return make_plan(spec, trace, link)
    if planted == "order":
        plan = make_plan("wfbp", trace, link)
        kept = list(reversed(plan.messages))
        if draw.random() < 0.5:  # the message of the last gradient is ahead of all others
            kept = [plan.messages[-1], *plan.messages[:-1]]
        return msgspec.structs.replace(plan, messages=tuple(kept), scheduler="file")
    if planted in ("tiny messages", "codec"):
        return make_plan("wfbp", trace, link)
    spec = str(
        draw.choice(
            ["wfbp", "mg-wfbp", f"bucket:mib={mib / 8:g},first_mib={mib / 30:g}", "p3", "dear"]
        )
    )
    if spec == "p3":
        spec += f":slice_elements={max(t.num_elements for t in trace.tensors)}"
    plan = make_plan(spec, trace, link)
    sizes = [message_bytes(plan, m) for m in plan.messages]
    if max(sizes) < 2 * min(sizes):  # start-up and bytes cannot be told apart by anybody
        spec, plan = "wfbp", make_plan("wfbp", trace, link)
    if spec == "wfbp" and draw.random() < 0.3:
        messages = (
            Message(parts=m.parts, channel=k % 2, priority=m.priority)
            for k, m in enumerate(plan.messages)
        )
        plan = msgspec.structs.replace(plan, messages=tuple(messages), num_channels=2)
    return plan


def _run(setting: Setting, steps: Sequence[int], draw: np.random.Generator) -> Timeline:
    ranks = range(setting.num_workers)
    offsets = draw.uniform(-1, 1, setting.num_workers) * draw.uniform(1e-5, 5e-5)
    offsets[0] = 0.0
    shift = offsets.tolist()
    exposed: dict[int, list[float]] = {}
    cores_used = {}
    now = np.zeros(setting.num_workers)
    pending: list[list[tuple[int, float]]] = [[] for _ in ranks]
    own_busy = float(draw.uniform(0.4, 0.8))
    for step in steps:
        fault = setting.window is None or step in setting.window
        step_begin_s = float(max(now))
        exposed[step] = [0.0] * setting.num_workers
        ready: list[np.ndarray] = []
        for rank in ranks:
            begun = now[rank]
            now[rank] = _forward(setting, step, rank, now[rank], pending[rank], exposed, draw)
            slow = fault and rank == setting.rank
            pace = np.array([t.backward_s for t in setting.trace.tensors])
            pace = pace * draw.normal(1, setting.noise, len(pace)).clip(0.7, 1.3)
            pace *= draw.normal(1, setting.noise / 3) * (setting.compute_factor if slow else 1.0)
            start = now[rank] + (setting.late_s if slow else 0.0)
            ready.append(start + np.array(list(accumulate(pace[::-1])))[::-1])
            for index, tensor in enumerate(setting.trace.tensors):
                moment = ready[rank][index]
                _add(setting, "ready", tensor.name, rank, step, moment, moment)
            now[rank] = ready[rank][0]
            _add(setting, "compute", "backward", rank, step, begun, now[rank])
        pending = _exchange(setting, step, ready, now, exposed, draw, fault=fault)
        if setting.votes:
            _vote(setting, step, now, exposed, fault=fault)
        for rank in ranks:
            update_s = 0.02 * setting.trace.backward_s * draw.normal(1, setting.noise)
            _add(setting, "update", "optimizer", rank, step, now[rank], now[rank] + update_s)
            now[rank] += update_s
        taken = setting.taken if fault else 0.0
        whole_s = CORES * float(max(now) - step_begin_s)
        near = draw.normal(0, 0.01, (2, setting.num_workers)).clip(-0.03, 0.03)
        cores_used[step] = [
            (
                whole_s * min(1.0, own_busy + taken + float(x)),
                whole_s * min(own_busy + float(x) - float(y), 1 - taken),
                whole_s,
            )
            for x, y in near.T
        ]
    events = [
        msgspec.structs.replace(e, begin_s=e.begin_s + shift[e.rank], end_s=e.end_s + shift[e.rank])
        for e in setting.events
    ]
    return Timeline(
        backend=setting.link.backend,
        num_workers=setting.num_workers,
        events=tuple(sorted(events, key=lambda e: e.begin_s)),
        scheduler=setting.plan.scheduler,
        compressor="drawn" if setting.encode_s else "",
        clocks=tuple(ClockLine(rank=r, uncertainty_s=5e-5) for r in ranks if r),
        plan=setting.plan,
        link=setting.link,
        exposed_s=exposed,
        cores_used=cores_used,
    )


def _forward(
    setting: Setting,
    step: int,
    rank: int,
    now: float,
    pending: list[tuple[int, float]],
    exposed: dict[int, list[float]],
    draw: np.random.Generator,
) -> float:
    """The forward pass, which waits for messages of the step before where the plan crosses it."""
    ends = dict(pending)
    for index, tensor in enumerate(setting.trace.tensors):
        for number, message in enumerate(setting.plan.messages):
            if number in ends and any(p.tensor == index for p in message.parts):
                now = _stand(setting, step, rank, number, now, ends.pop(number), exposed)
        now += tensor.forward_s * draw.normal(1, setting.noise)
    return now


def _stand(
    setting: Setting,
    step: int,
    rank: int,
    number: int,
    now: float,
    end: float,
    exposed: dict[int, list[float]],
) -> float:
    after = max(now, end) + 2e-6
    _add(setting, "wait", f"m{number}", rank, step, now, after, message=number)
    exposed[step][rank] += float(after - now)
    return after


def _exchange(
    setting: Setting,
    step: int,
    ready: list[np.ndarray],
    now: np.ndarray,
    exposed: dict[int, list[float]],
    draw: np.random.Generator,
    *,
    fault: bool,
) -> list[list[tuple[int, float]]]:
    """All messages of a step; what is still to be waited for in the next forward pass."""
    plan, ranks = setting.plan, range(setting.num_workers)
    count = len(plan.messages)
    queued = np.array([_queued(setting, step, rank, ready[rank]) for rank in ranks])
    release = queued.max(axis=0)
    sizes = [message_bytes(plan, m) for m in plan.messages]
    link = msgspec.structs.replace(
        setting.link,
        latency_s=setting.link.latency_s * (setting.startup_factor if fault else 1.0),
        seconds_per_byte=setting.link.seconds_per_byte * (setting.byte_factor if fault else 1.0),
    )
    shaken = [s * abs(draw.normal(1, setting.noise)) for s in sizes]
    if fault and setting.taken:  # every message waits for a core, now and then for long
        extra = draw.exponential(0.4, count) + 0.2
        shaken = [
            s + x * link.time_s(s) / link.seconds_per_byte
            for s, x in zip(shaken, extra, strict=True)
        ]
    base = float(release.min())
    rows: list[tuple[int, str, float, float]] = []
    if plan.halves:
        half = msgspec.structs.replace(
            link, latency_s=link.latency_s / 2, seconds_per_byte=link.seconds_per_byte / 2
        )
        order = list(
            dict.fromkeys(
                n
                for t in range(len(plan.names))
                for n in range(count)
                if any(p.tensor == t for p in plan.messages[n].parts)
            )
        )
        barrier = float(now.max())
        times = serial_s(
            [*release, *([barrier] * count)], [*shaken, *(shaken[n] for n in order)], half
        )
        rows = [(n, "fold", *times[n]) for n in range(count)]
        rows += [(n, "spread", *times[count + k]) for k, n in enumerate(order)]
    else:
        if plan.order == "priority":
            times = prioritised_s(
                [float(r) for r in release],
                [m.priority for m in plan.messages],
                [int(s) for s in shaken],
                [link.time_s(s) for s in shaken],
                None,
            )
        elif plan.num_channels > 1:
            found = concurrent_s(
                plan, [float(r) - base for r in release], [int(s) for s in shaken], link
            )
            times = [(s + base, e + base) for s, e in found]
        else:
            times = serial_s(release, shaken, link)
        rows = [(n, "", *times[n]) for n in range(count)]
    arrived: list[dict[int, float]] = [{} for _ in ranks]
    for rank in ranks:
        free = dict.fromkeys(range(plan.num_channels), 0.0)
        decoded = 0.0
        for number, half_name, start, end in sorted(rows, key=lambda row: row[2]):
            channel = plan.messages[number].channel
            handed = now[rank] if half_name == "spread" else queued[rank][number]
            begin = min(start, max(handed, free[channel]))
            lag = abs(draw.normal(0, 0.003)) * (end - start)
            free[channel] = end + lag
            name = f"m{number}"
            of = {"message": number, "channel": channel, "half": half_name}
            _add(setting, "queued", name, rank, step, handed, handed, **of)
            _add(setting, "send", name, rank, step, begin, end + lag, num_bytes=sizes[number], **of)
            arrived[rank][number] = end + lag
            if setting.encode_s:
                first = max(decoded, end + lag)
                decoded = first + setting.encode_s / 4
                _add(setting, "decode", name, rank, step, first, decoded, message=number)
                arrived[rank][number] = decoded
        if plan.crosses_iteration:
            continue
        for number in range(count):
            now[rank] = _stand(
                setting, step, rank, number, now[rank], arrived[rank][number], exposed
            )
    return [list(of.items()) if plan.crosses_iteration else [] for of in arrived]


def _vote(
    setting: Setting,
    step: int,
    now: np.ndarray,
    exposed: dict[int, list[float]],
    *,
    fault: bool,
) -> None:
    """A small message that is handed over when all others have been waited for."""
    start, name = float(now.max()), "(parameters in use)"
    end = start + setting.link.time_s(96) * (setting.startup_factor if fault else 1.0)
    for rank in range(setting.num_workers):
        handed = now[rank]
        _add(setting, "queued", name, rank, step, handed, handed, channel=0)
        _add(setting, "send", name, rank, step, handed, end, channel=0, num_bytes=96)
        _add(setting, "wait", name, rank, step, handed, end + 2e-6)
        exposed[step][rank] += float(end + 2e-6 - handed)
        now[rank] = end + 2e-6


def _queued(setting: Setting, step: int, rank: int, ready: np.ndarray) -> list[float]:
    """When a rank hands over each message: behind those before it on its channel, if encoded."""
    plan = setting.plan
    coder, found = 0.0, []
    before: dict[int, float] = {}
    for number, message in enumerate(plan.messages):
        moment = max(ready[p.tensor] for p in message.parts)
        if setting.packs and len(message.parts) > 1:
            for part in message.parts:
                first = ready[part.tensor] + 1e-6
                copied = first + 2e-6
                _add(setting, "encode", f"m{number}", rank, step, first, copied, message=number)
                moment = max(moment, copied)
        if plan.after_backward:
            moment = max(ready)
        if setting.encode_s:
            first = max(coder, moment)
            moment = coder = first + setting.encode_s
            _add(setting, "encode", f"m{number}", rank, step, first, coder, message=number)
        if plan.order == "fifo":
            moment = max(moment, before.get(message.channel, 0.0))
            before[message.channel] = moment
        found.append(float(moment))
    return found


def _add(
    setting: Setting,
    kind: Kind,
    name: str,
    rank: int,
    step: int,
    begin: float,
    end: float,
    **more: int | str,
) -> None:
    event = TimelineEvent(
        kind=kind,
        name=name,
        rank=rank,
        step=step,
        begin_s=float(begin),
        end_s=float(end),
        **more,  # type: ignore[arg-type]
    )
    setting.events.append(event)
