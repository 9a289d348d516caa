"""What `testbed why` tells, as one record: `testbed.why/1`. Times are seconds of one step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import median
from typing import Final, Literal

import msgspec

from testbed.causes.costs import Costs, identity
from testbed.causes.exchanges import Exchange, Round
from testbed.causes.explain import HOST, LATE, LINK, STARTUP, Explanation, explain
from testbed.causes.lateness import Busy
from testbed.records.timeline import Timeline

WHY_SCHEMA: Final = "testbed.why/1"
MOST_RANKS = 4  # that a note names
CHANGED = 1.1  # ratio to usual from which a change of the link is told
SAME = 0.05  # share of the exposed time by which steps may differ from usual ones without a reason


class CauseRow(msgspec.Struct, frozen=True, kw_only=True):
    """One cause.

    Attributes:
        cause: its name.
        exposed_s: mean over ranks and steps.
        more_s: than in the other steps of the run; null: there are none to compare with.
        note: which rank, how much slower.
    """

    cause: str
    exposed_s: float
    more_s: float | None = None
    note: str = ""


class RankRow(msgspec.Struct, frozen=True, kw_only=True):
    """One rank.

    Attributes:
        own_s: from one backward pass's end to the next one's without waits.
        exposed_s: it stood still.
        transferring_s: wait-free time of its exchanges.
        waiting_s: that its exchanges lasted longer, for other ranks.
    """

    rank: int
    own_s: float
    exposed_s: float
    transferring_s: float
    waiting_s: float


class TensorRow(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor, or one message where no plan was recorded; medians over steps of the last rank.

    Attributes:
        ready_s: its gradient was final, from the step's begin; likewise the next three.
        queued_s: its message was handed over.
        started_s: the exchange started.
        ended_s: it had ended.
        wait_free_s: the least duration of its exchanges on any rank, their sum.
        exposed_s: its share, by bytes, of the waits for its messages; mean over ranks and steps.
        causes: cause -> seconds of these.
    """

    name: str
    ready_s: float
    queued_s: float
    started_s: float
    ended_s: float
    wait_free_s: float
    exposed_s: float
    causes: dict[str, float]


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """A change and what the simulator says that it gains.

    Attributes:
        change: in words.
        gain_s: of a step; 0: nothing.
        options: of `testbed run` that make the change; empty: none does.
    """

    change: str
    gain_s: float
    options: dict[str, str] = {}


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """Why time was exposed.

    Attributes:
        first: the cause that is named first; `cannot tell` too.
        steps: that were explained.
        exposed_s: of a step, mean over ranks.
        usual_s: of the run's other steps.
        step_s: median time of a step.
        overlap: share of the time with an exchange under way in which the rank did not stand still.
        causes: the largest first.
        clock_uncertainty_s: of the times of different ranks to each other.
        notes: what limits this.
    """

    schema: Literal["testbed.why/1"] = WHY_SCHEMA
    backend: str
    scheduler: str
    workload: str
    num_workers: int
    steps: tuple[int, ...]
    first: str
    exposed_s: float
    usual_s: float | None
    step_s: float
    overlap: float
    causes: tuple[CauseRow, ...]
    ranks: tuple[RankRow, ...]
    tensors: tuple[TensorRow, ...]
    advice: tuple[Advice, ...] = ()
    clock_uncertainty_s: float = 0.0
    notes: tuple[str, ...] = ()


Adviser = Callable[[Explanation], Sequence[Advice]]


def why(
    timeline: Timeline, steps: Collection[int] | None = None, advise: Adviser | None = None
) -> Why:
    """The record of why time was exposed in these steps; None: all.

    Raises:
        UsageError: see `explain`.
    """
    found, usual = explain(timeline, steps)
    against = usual
    if usual is not None and found.ranked(usual)[0][1] < SAME * found.exposed_s:
        against = None  # no change to speak of: by what there is
    notes = []
    if not timeline.device.startswith("cpu"):
        notes.append(f"times of compute on {timeline.device} are those of launching it")
    if steps is not None and usual is None:
        notes.append("too few other steps: these are compared with nothing")
    missing = 0 if steps is None else len(set(steps) - set(found.steps))
    if missing:
        notes.append(f"{missing} of the steps that were asked for are not in the timeline")
    if timeline.dropped:
        notes.append(f"{timeline.dropped} events found no room and are missing")
    if timeline.plan is None:
        notes.append("no plan was recorded: a message counts as one tensor")
    if found.costs.untold_s:
        notes.append("messages of one size and no link: start-up and bytes cannot be told apart")
    return Why(
        backend=timeline.backend,
        scheduler=timeline.scheduler,
        workload=timeline.workload,
        num_workers=timeline.num_workers,
        steps=found.steps,
        first=found.first(against),
        exposed_s=found.exposed_s,
        usual_s=None if usual is None else usual.exposed_s,
        step_s=_step_s(timeline, found.rounds),
        overlap=_overlap(found),
        causes=tuple(
            CauseRow(
                cause=cause,
                exposed_s=found.causes_s[cause],
                more_s=None if usual is None else found.causes_s[cause] - usual.causes_s[cause],
                note=_note(cause, found, usual),
            )
            for cause, _ in found.ranked(against)
        ),
        ranks=tuple(_rank(rank, found) for rank in range(timeline.num_workers)),
        tensors=tuple(_tensors(timeline, found)),
        advice=() if advise is None else (*_free_hosts(timeline, found, usual), *advise(found)),
        clock_uncertainty_s=max((c.uncertainty_s for c in timeline.clocks), default=0.0),
        notes=tuple(notes),
    )


def _note(cause: str, found: Explanation, usual: Explanation | None) -> str:
    lateness = found.lateness
    if cause == LATE and lateness.late:
        return ", ".join(
            f"rank {r} by {lateness.late_s[r] * 1e3:.3g} ms" for r in sorted(lateness.late)
        )
    if cause == HOST and lateness.busy:
        return _busy_note(lateness.busy)
    if cause not in (LINK, STARTUP):
        return ""
    base = found.costs if usual is None else usual.costs
    against = "in the other steps" if usual is not None else "by its link file"
    if usual is None and not base.has_link:
        return ""
    keys = [k for k in found.costs.sizes if k in base.sizes]
    now_s = sum(_part_s(found.costs, cause, k) for k in keys)
    then_s = sum(
        _part_s(base, cause, k)
        if usual is not None
        else (base.transfer_s if cause == LINK else base.startup_s)[k]
        for k in keys
    )
    if then_s <= 0 or now_s < CHANGED * then_s:
        return ""
    what = "bytes take" if cause == LINK else "start-ups take"
    return f"{what} {now_s / then_s:.2g} x what they take {against}"


def _busy_note(busy: Mapping[int, Busy]) -> str:
    """The ranks whose hosts were busiest, each by the share that tells it."""
    worst = sorted(busy.items(), key=lambda item: -item[1].share)[:MOST_RANKS]
    told = []
    for awaited, what in ((False, "cores taken by others"), (True, "time waiting for a core")):
        ranks = [f"rank {r} {b.share:.0%}" for r, b in worst if b.awaited is awaited]
        told += [f"{what}: {', '.join(ranks)}"] * bool(ranks)
    return "; ".join(told)


def _free_hosts(
    timeline: Timeline, found: Explanation, usual: Explanation | None
) -> Sequence[Advice]:
    """What a busy host costs the rank that stands still most, steps played back without it.

    Ranks whose exchanges no longer last may themselves take longer: no step gains more than the
    run's other steps are shorter, where the hosts were not busy in those and they are shorter.
    """
    busy = found.lateness.busy
    if not busy:
        return ()
    gained = max(of.get(HOST, 0.0) for of in found.by_rank_s)
    if usual is not None and not usual.lateness.busy:
        shorter = _step_s(timeline, found.rounds) - _step_s(timeline, usual.rounds)
        gained = min(gained, shorter) if shorter > 0 else gained
    names = ", ".join(map(str, sorted(busy)))
    return (Advice(change=f"nothing else on the cores of rank {names}", gain_s=gained),)


def _part_s(costs: Costs, cause: str, key: tuple[int, int]) -> float:
    return costs.whole_transfer_s(key) if cause == LINK else costs.whole_startup_s(key)


def _step_s(timeline: Timeline, rounds: Sequence[Round]) -> float:
    """Median time of these steps on the slowest rank; by backward passes where none is recorded."""
    longest: dict[int, float] = defaultdict(float)
    for event in timeline.events:
        if event.kind == "step" and event.rank < timeline.num_workers:
            longest[event.step] = max(longest[event.step], event.duration_s)
    if recorded := [longest[r.step] for r in rounds if r.step in longest]:
        return median(recorded)
    ends = [max(r.backward_end_s) for r in rounds]
    paces = [
        (b - a) / (later.step - r.step)
        for a, b, r, later in zip(ends, ends[1:], rounds, rounds[1:], strict=False)
    ]
    return median(paces) if paces else rounds[0].exchanges[-1].ended_s - rounds[0].begin_s


def _overlap(found: Explanation) -> float:
    """Over ranks and steps: exchanges are under way, and the rank computes."""
    under_way_s = stood_s = 0.0
    for played in found.rounds:
        for rank, waits in enumerate(played.waits):
            spans: list[list[float]] = []
            for begin, end in sorted((x.begin_s[rank], x.end_s[rank]) for x in played.exchanges):
                if spans and begin <= spans[-1][1]:
                    spans[-1][1] = max(spans[-1][1], end)
                else:
                    spans.append([begin, end])
            under_way_s += sum(end - begin for begin, end in spans)
            stood_s += sum(
                max(0.0, min(end, wait.end_s) - max(begin, wait.begin_s))
                for wait in waits
                if wait.exchange is not None
                for begin, end in spans
            )
    return 1 - stood_s / under_way_s if under_way_s > 0 else 1.0


def _rank(rank: int, found: Explanation) -> RankRow:
    exchanges = [[x for x in r.exchanges] for r in found.rounds]
    own = [[x.end_s[rank] - x.begin_s[rank] for x in of] for of in exchanges]
    free = [sum(x.wait_free_s for x in of) for of in exchanges]
    return RankRow(
        rank=rank,
        own_s=median(r.own_s[rank] for r in found.rounds),
        exposed_s=sum(found.by_rank_s[rank].values()),
        transferring_s=median(free),
        waiting_s=median(sum(o) - f for o, f in zip(own, free, strict=True)),
    )


def _tensors(timeline: Timeline, found: Explanation) -> list[TensorRow]:
    """Rows in the order in which the tensors are ready."""
    moments: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    free: dict[str, float] = defaultdict(float)
    for played in found.rounds:
        of_step: dict[str, list[tuple[float, ...]]] = defaultdict(list)
        for x in played.exchanges:
            for name, _, ready_s in _named(timeline, x):
                at = (ready_s, max(x.queued_s), x.started_s, x.ended_s)
                of_step[name].append(tuple(moment - played.begin_s for moment in at))
                free[name] += x.wait_free_s / len(found.rounds)
        for name, rows in of_step.items():
            first = min(row[0] for row in rows), min(row[1] for row in rows)
            moments[name].append((*first, min(r[2] for r in rows), max(r[3] for r in rows)))
    causes: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    scale = 1 / len(found.steps) / timeline.num_workers
    for each in found.stood:
        if each.wait.exchange is None:
            continue
        for name, share, _ in _named(timeline, each.wait.exchange):
            for cause, seconds in each.causes_s.items():
                causes[name][cause] += seconds * share * scale
    made: list[TensorRow] = []
    for name, found_s in moments.items():
        ready, queued, started, ended = (median(column) for column in zip(*found_s, strict=True))
        parts = {c: float(s) for c, s in causes[name].items() if s > 0}
        made.append(
            TensorRow(
                name=name,
                ready_s=ready,
                queued_s=queued,
                started_s=started,
                ended_s=ended,
                wait_free_s=free[name],
                exposed_s=sum(parts.values()),
                causes=parts,
            )
        )
    return sorted(made, key=lambda row: row.ready_s)


def _named(timeline: Timeline, exchange: Exchange) -> list[tuple[str, float, float]]:
    """Name, share of the bytes and moment of readiness of each tensor in an exchange."""
    number, _ = identity(exchange)
    plan = timeline.plan
    if plan is None or not 0 <= number < len(plan.messages):
        return [(exchange.name, 1.0, max(exchange.ready_s))]
    parts = plan.messages[number].parts
    whole = sum(p.stop - p.start for p in parts) or 1
    known = [max(moments) for moments, _ in exchange.parts_s]
    ready = known or [max(exchange.ready_s)] * len(parts)
    return [
        (plan.names[p.tensor], (p.stop - p.start) / whole, at)
        for p, at in zip(parts, ready, strict=True)
    ]
