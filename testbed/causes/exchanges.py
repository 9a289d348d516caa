"""A timeline's events put together: exchanges across ranks, and what each rank waited for."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import inf

from testbed.base.axes import COMPRESSORS
from testbed.base.errors import UsageError
from testbed.base.plan import Plan
from testbed.prediction.timeline import message_bytes
from testbed.records.timeline import Kind, Timeline, TimelineEvent

SLACK_S = 2e-6  # by which events that follow one another may overlap


@dataclass(frozen=True, eq=False)
class Exchange:
    """One exchange of a message, seen by all ranks; lists hold one value for each rank.

    Attributes:
        step: in which it was queued.
        message: number in the plan, or of its name where there is no plan.
        turn: 0, 1, ...: of the message's halves or of its compressor's rounds.
        half: `fold`, `spread` or empty.
        num_bytes: of the message; what was moved under a compressor or without a plan.
        ready_s: when the last gradient in it was final; of later turns when they were queued.
        coded_s: likewise, and it was encoded.
        encode_s: how long that took from then on.
        queued_s: when it was handed over.
        begin_s: when it started.
        end_s: when it had ended.
        parts_s: for each part when its gradient was final, and its share of the bytes.
    """

    step: int
    message: int
    turn: int
    name: str
    half: str
    channel: int
    num_bytes: float
    ready_s: list[float]
    coded_s: list[float]
    encode_s: list[float]
    queued_s: list[float]
    begin_s: list[float]
    end_s: list[float]
    parts_s: list[tuple[list[float], float]]

    @cached_property
    def started_s(self) -> float:
        """When the last rank had started it: before that none could have ended."""
        return max(self.begin_s)

    @cached_property
    def ended_s(self) -> float:
        """When it had ended on all ranks."""
        return max(self.end_s)

    @cached_property
    def duration_s(self) -> float:
        """From the last start to the last end."""
        return max(0.0, self.ended_s - self.started_s)

    @cached_property
    def wait_free_s(self) -> float:
        """The least duration of any rank: the last one to start waits for nobody."""
        return min(e - b for b, e in zip(self.begin_s, self.end_s, strict=True))


@dataclass(frozen=True, eq=False)
class Wait:
    """A rank's computing thread stood still.

    Attributes:
        step: in which it stood still; its exchange may be of the step before.
        decode_s: of it after the exchange had ended, in decoding.
    """

    rank: int
    step: int
    begin_s: float
    end_s: float
    exchange: Exchange | None
    decode_s: float = 0.0

    @cached_property
    def duration_s(self) -> float:
        """How long."""
        return self.end_s - self.begin_s


@dataclass(frozen=True, eq=False)
class Round:
    """All exchanges of one step, in the order of their starts, and the waits for them.

    Attributes:
        begin_s: of the step, on the first rank; of its first gradient where that is not recorded.
        backward_end_s: of each rank, when its last gradient was final.
        own_s: of each rank, from the backward pass before to this one's end, without waits.
        waits: of each rank, in order.
    """

    step: int
    exchanges: list[Exchange]
    begin_s: float
    backward_end_s: list[float]
    own_s: list[float]
    waits: list[list[Wait]]


Key = tuple[int, int, int]  # step, rank, message


@dataclass(frozen=True, eq=False)
class _Index:
    """Events by step, rank and message, in order of begin."""

    timeline: Timeline
    is_dense: bool
    found: dict[Kind, dict[Key, list[TimelineEvent]]]

    @classmethod
    def of(cls, timeline: Timeline) -> _Index:
        numbers: dict[str, int] = {}  # of what is none of the plan's messages
        in_plan = 0 if timeline.plan is None else len(timeline.plan.messages)
        found: dict[Kind, dict[Key, list[TimelineEvent]]] = defaultdict(lambda: defaultdict(list))
        for event in sorted(timeline.events, key=lambda e: e.begin_s):
            if event.rank >= timeline.num_workers:
                continue
            number = event.message
            if number < 0 and event.kind in ("queued", "encode", "send", "decode"):
                number = numbers.setdefault(event.name, in_plan + len(numbers))
            found[event.kind][event.step, event.rank, number].append(event)
        return cls(timeline, timeline.compressor in ("", COMPRESSORS.default), found)

    def get(self, kind: Kind, key: Key) -> list[TimelineEvent]:
        return self.found[kind].get(key, [])


def rounds_of(timeline: Timeline) -> list[Round]:
    """The exchanges of each step with the waits for them.

    Raises:
        UsageError: no exchange was recorded.
    """
    index = _Index.of(timeline)
    sent: dict[tuple[int, int], set[int]] = defaultdict(set)
    for step, rank, message in index.found["send"]:
        sent[step, message].add(rank)
    whole = [key for key, ranks in sorted(sent.items()) if len(ranks) == timeline.num_workers]
    if not whole and timeline.dropped:
        raise UsageError(
            f"the timeline holds no whole step: {timeline.dropped} events found no room; record "
            "again with fewer of them in a step: larger messages or slices, a smaller --accumulate"
        )
    if not whole:
        raise UsageError(
            "the timeline holds no exchange that all ranks recorded; expected `send` events of "
            f"{timeline.num_workers} ranks; run again with --timeline and a backend that exchanges"
        )
    ready = _ready(index)
    steps: dict[int, list[Exchange]] = {}
    for step, keys in groupby(whole, key=lambda key: key[0]):
        found = [x for _, number in keys for x in _exchanges(index, step, number, ready)]
        steps[step] = sorted(found, key=lambda x: (x.started_s, x.turn))
    waits = _waits(index, [x for found in steps.values() for x in found])
    return _rounds(index, steps, waits, ready)


def _ready(index: _Index) -> dict[tuple[int, int], dict[str, float]]:
    ready: dict[tuple[int, int], dict[str, float]] = defaultdict(dict)
    for (step, rank, _), events in index.found["ready"].items():
        ready[step, rank].update({event.name: event.begin_s for event in events})
    return ready


def _exchanges(
    index: _Index, step: int, number: int, ready: dict[tuple[int, int], dict[str, float]]
) -> Iterable[Exchange]:
    timeline = index.timeline
    ranks = range(timeline.num_workers)
    sends = [index.get("send", (step, rank, number)) for rank in ranks]
    names, shares = _parts(timeline.plan, number)
    moments = [ready.get((step, rank), {}) for rank in ranks]
    known = bool(names) and all(name in of_rank for of_rank in moments for name in names)
    before = [-inf] * timeline.num_workers
    for turn in range(min(map(len, sends))):
        now = [events[turn] for events in sends]
        queued, coded, encode, is_ready = [], [], [], []
        for rank, send in enumerate(now):
            handed = index.get("queued", (step, rank, number))
            at = handed[turn].begin_s if turn < len(handed) else max(before[rank], -inf)
            at = min(at if at > -inf else send.begin_s, send.begin_s)
            codes = [
                e
                for e in index.get("encode", (step, rank, number))
                if before[rank] - SLACK_S <= e.begin_s and e.end_s <= send.begin_s + SLACK_S
            ]
            first = max(moments[rank][n] for n in names) if known and turn == 0 else inf
            # parts that were packed into a bucket before its last gradient was final are no codec
            begun = min([at, *(e.begin_s for e in codes)])
            is_ready.append(min(first, at) if first < inf else begun)
            coded.append(min(at, max([is_ready[-1], *(e.end_s for e in codes)])))
            encode.append(sum(max(0.0, e.end_s - max(e.begin_s, is_ready[-1])) for e in codes))
            queued.append(at)
        parts = [([m[n] for m in moments], s) for n, s in zip(names, shares, strict=True)]
        yield Exchange(
            step=step,
            message=number,
            turn=turn,
            name=now[0].name,
            half=now[0].half,
            channel=max(now[0].channel, 0),
            num_bytes=_num_bytes(index, number, now),
            ready_s=is_ready,
            coded_s=coded,
            encode_s=encode,
            queued_s=queued,
            begin_s=[e.begin_s for e in now],
            end_s=[e.end_s for e in now],
            parts_s=parts if known and turn == 0 and (index.is_dense or not any(encode)) else [],
        )
        before = [e.end_s for e in now]


def _parts(plan: Plan | None, number: int) -> tuple[list[str], list[float]]:
    if plan is None or not 0 <= number < len(plan.messages):
        return [], []
    parts = plan.messages[number].parts
    whole = sum(p.stop - p.start for p in parts) or 1
    return [plan.names[p.tensor] for p in parts], [(p.stop - p.start) / whole for p in parts]


def _num_bytes(index: _Index, number: int, sends: list[TimelineEvent]) -> float:
    plan = index.timeline.plan
    if plan is not None and 0 <= number < len(plan.messages) and index.is_dense:
        return float(message_bytes(plan, plan.messages[number]))
    return float(max(e.num_bytes for e in sends))


def _waits(index: _Index, exchanges: list[Exchange]) -> list[Wait]:
    by_rank: dict[tuple[int, int], list[Exchange]] = defaultdict(list)
    ranks = range(index.timeline.num_workers)
    for exchange in exchanges:
        for rank in ranks:
            by_rank[rank, exchange.message].append(exchange)
            by_rank[rank, -1].append(exchange)
    begins = {}
    for (rank, number), found in by_rank.items():
        pairs = [(x.end_s[rank] if number < 0 else x.begin_s[rank], x) for x in found]
        pairs.sort(key=lambda pair: pair[0])
        begins[rank, number] = [moment for moment, _ in pairs]
        found[:] = [x for _, x in pairs]
    waits = []
    for (step, rank, number), events in index.found["wait"].items():
        for event in events:
            where = (rank, number) if (rank, number) in by_rank else (rank, -1)
            last = bisect_right(begins[where], event.end_s + SLACK_S) - 1
            while last > 0 and by_rank[where][last].end_s[rank] > event.end_s + SLACK_S:
                last -= 1
            matched = by_rank[where][last] if last >= 0 else None
            if matched is not None and matched.step not in (step, step - 1):
                matched = None
            decode_s = 0.0 if matched is None else _decode_s(index, event, matched)
            waits.append(Wait(rank, step, event.begin_s, event.end_s, matched, decode_s))
    waited = {wait.rank for wait in waits}
    for rank in set(ranks) - waited:  # a framework that waits inside: from the last gradient on
        waits += _inside(index, rank, exchanges)
    return sorted(waits, key=lambda w: w.begin_s)


def _decode_s(index: _Index, wait: TimelineEvent, exchange: Exchange) -> float:
    """How long the wait lasted on for decoding after the exchange had ended."""
    decodes = index.get("decode", (exchange.step, wait.rank, exchange.message))
    after = max(exchange.end_s[wait.rank], wait.begin_s)
    ends = [e.end_s for e in decodes if e.end_s > after and e.begin_s < wait.end_s]
    return max(0.0, min(wait.end_s, max(ends, default=after)) - after)


def _inside(index: _Index, rank: int, exchanges: list[Exchange]) -> Iterable[Wait]:
    for step, found in groupby(exchanges, key=lambda x: x.step):
        mine = list(found)
        last = max(mine, key=lambda x: x.end_s[rank])
        computed = [
            event.end_s
            for (at, of_rank, _), events in index.found["compute"].items()
            for event in events
            if at == step and of_rank == rank and event.end_s <= last.end_s[rank]
        ]
        begin = max([*computed, *(x.queued_s[rank] for x in mine)])
        if begin < last.end_s[rank]:
            yield Wait(rank, step, begin, last.end_s[rank], last)


def _rounds(
    index: _Index,
    steps: dict[int, list[Exchange]],
    waits: list[Wait],
    ready: dict[tuple[int, int], dict[str, float]],
) -> list[Round]:
    ranks = range(index.timeline.num_workers)
    by_step: dict[int, list[list[Wait]]] = defaultdict(lambda: [[] for _ in ranks])
    stood: dict[tuple[int, int], list[Wait]] = defaultdict(list)
    for wait in waits:
        stood[wait.step, wait.rank].append(wait)
        by_step[wait.step if wait.exchange is None else wait.exchange.step][wait.rank].append(wait)
    begun: dict[tuple[int, int], float] = {}
    for (step, rank, _), events in index.found["step"].items():
        begun[step, rank] = min(e.begin_s for e in events)
    found = []
    before: Round | None = None
    for step, exchanges in sorted(steps.items()):
        first = [x for x in exchanges if x.turn == 0]
        moments = [
            [*ready.get((step, rank), {}).values()] or [x.queued_s[rank] for x in first]
            for rank in ranks
        ]
        begins = [begun.get((step, rank), min(moments[rank])) for rank in ranks]
        ends = [max(of_rank) for of_rank in moments]
        starts = begins if before is None else before.backward_end_s
        near = (step,) if before is None else (before.step, step)
        own = [
            ends[rank]
            - starts[rank]
            - _stood_s((w for at in near for w in stood[at, rank]), starts[rank], ends[rank])
            for rank in ranks
        ]
        before = Round(step, exchanges, min(begins), ends, own, by_step[step])
        found.append(before)
    return found


def _stood_s(waits: Iterable[Wait], begin_s: float, end_s: float) -> float:
    return sum(max(0.0, min(w.end_s, end_s) - max(w.begin_s, begin_s)) for w in waits)
