"""Divides exposed time among its causes: each step is played back without one after the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from testbed.base.errors import UsageError
from testbed.base.types import IN_STEP
from testbed.causes.costs import (
    Costs,
    Identity,
    Share,
    identity,
    tiny_messages,
)
from testbed.causes.exchanges import Exchange, Round, Wait, rounds_of
from testbed.causes.lateness import Lateness, lateness_of
from testbed.causes.replay import Playback, Without
from testbed.records.timeline import Timeline

LATE: Final = "late rank"
HOST: Final = "busy host"
ORDER: Final = "order"
CODEC: Final = "codec"
DEPENDENCY: Final = "dependency"
TINY: Final = "tiny messages"
STARTUP: Final = "start-up"
LINK: Final = "saturated link"
UNTOLD: Final = "start-up or link"  # told, and never named
UNKNOWN: Final = "cannot tell"
CAUSES: Final = (LATE, HOST, ORDER, CODEC, DEPENDENCY, TINY, STARTUP, LINK)
ROWS: Final = (*CAUSES, UNTOLD, UNKNOWN)

MIN_USUAL = 4  # so many other steps are needed to hold some against


@dataclass(frozen=True)
class Stood:
    """One wait with the seconds that each cause has of it; together the wait."""

    wait: Wait
    causes_s: dict[str, float]


@dataclass(frozen=True)
class Explanation:
    """Why time was exposed in some steps.

    Attributes:
        steps: that are explained.
        causes_s: cause -> exposed seconds a step, mean over ranks; `cannot tell` among them.
        by_rank_s: likewise of each rank.
        stood: each wait of these steps.
        rounds: the exchanges.
        lateness: late ranks and busy hosts.
        costs: start-up and transfer in these steps.
    """

    steps: tuple[int, ...]
    causes_s: dict[str, float]
    by_rank_s: list[dict[str, float]]
    stood: list[Stood]
    rounds: list[Round]
    lateness: Lateness
    costs: Costs

    @property
    def exposed_s(self) -> float:
        """Seconds a step, mean over ranks."""
        return sum(self.causes_s.values())

    def ranked(self, usual: Explanation | None = None) -> list[tuple[str, float]]:
        """Causes, the largest first; with usual steps by what they have more than in those."""
        base = {} if usual is None else usual.causes_s
        more = {c: s - base.get(c, 0.0) for c, s in self.causes_s.items()}
        return sorted(more.items(), key=lambda pair: -pair[1])

    def first(self, usual: Explanation | None = None) -> str:
        """The cause to be named: the largest, or `cannot tell` where that is more than half.

        So too where the largest is what start-ups and bytes that cannot be told apart take.
        """
        ranked = self.ranked(usual)
        cause, seconds = next(pair for pair in ranked if pair[0] != UNKNOWN)
        grown_s = sum(max(0.0, s) for _, s in ranked)
        unknown_s = dict(ranked)[UNKNOWN]
        is_told = cause != UNTOLD and seconds > 0 and unknown_s <= grown_s / 2
        return cause if is_told else UNKNOWN


def explain(
    timeline: Timeline, steps: Collection[int] | None = None
) -> tuple[Explanation, Explanation | None]:
    """Why time was exposed in these steps, and in the others of the run.

    Each step is played back from its events, first as measured, then without late ranks, without
    what a busy host added, without what start-ups and bytes have come to take more than in the
    run's other steps, in the best order, without codec, without dependencies, without
    start-ups of tiny messages, without other start-ups, without bytes, without what of both cannot
    be told apart. What each of these takes
    off the waits is that cause's; what is left then nobody can tell. The causes sum to the waits,
    and to what the session counted as exposed where that was recorded.

    Args:
        timeline: of all ranks.
        steps: to be explained; None: all.

    Returns:
        Of these steps; of the others, None where they are fewer than 4.

    Raises:
        UsageError: no exchange was recorded in these steps, or ranks do not wait for each other.
    """
    if timeline.consistency not in IN_STEP:
        raise UsageError(
            f"the run has consistency={timeline.consistency}, under which ranks do not wait for "
            "each other's exchanges; runs with consistency=bsp can be explained"
        )
    rounds = rounds_of(timeline)
    known = [r.step for r in rounds]
    wanted = set(known if steps is None else steps)
    chosen = [r for r in rounds if r.step in wanted]
    if not chosen:
        raise UsageError(
            f"no exchange was recorded in the steps that were asked for; the timeline holds steps "
            f"{known[0]} to {known[-1]}"
        )
    others = [r for r in rounds if r.step not in wanted]
    if len(others) < MIN_USUAL:
        others = []
    normal = lateness_of(timeline, others, []) if others else None
    usual_costs = Costs.of(others or chosen, timeline.link)
    lateness = lateness_of(timeline, chosen, others)
    if normal is not None:  # a rank that is late in the other steps as well is late here
        lateness = lateness.with_lasting(lateness_of(timeline, chosen, []), normal)
    # what a busy host adds is told from what the link takes by steps in which it was not busy
    costs = _base(others, chosen, timeline) if lateness.busy else _costs(chosen, timeline)
    basis = _Basis(timeline, lateness, costs, usual_costs, _gaps(others))
    found = basis.explanation(chosen, rounds)
    if normal is None:
        return found, None
    basis = _Basis(timeline, normal, usual_costs, usual_costs, {})
    return found, basis.explanation(others, rounds)


def _costs(rounds: Sequence[Round], timeline: Timeline) -> Costs:
    return Costs.of(rounds, timeline.link)


def _base(others: Sequence[Round], chosen: Sequence[Round], timeline: Timeline) -> Costs:
    if others:
        return _costs(others, timeline)
    fitted = _costs(chosen, timeline)
    if timeline.link is None:
        return fitted
    return replace(fitted, more_startup_s=0.0, more_s_per_byte=0.0, missed_s=0.0)


def _gaps(rounds: Iterable[Round]) -> dict[Identity, float]:
    gaps: dict[Identity, list[float]] = defaultdict(list)
    for each in rounds:
        played = Playback(each, [Share()] * len(each.exchanges))
        for exchange, gap_s in zip(each.exchanges, played.gaps_s, strict=True):
            gaps[identity(exchange)].append(gap_s)
    return {key: median(found) for key, found in gaps.items()}


@dataclass(frozen=True)
class _Basis:
    """What steps are held against."""

    timeline: Timeline
    lateness: Lateness
    costs: Costs
    usual_costs: Costs
    usual_gap_s: dict[Identity, float]

    def explanation(self, chosen: Sequence[Round], rounds: Sequence[Round]) -> Explanation:
        steps = {r.step for r in chosen}
        tiny = tiny_messages(self.costs, self.usual_costs)
        stood = [
            each
            for played in rounds
            if any(w.step in steps for waits in played.waits for w in waits)
            for each in self._stood(played, tiny)
            if each.wait.step in steps
        ]
        by_rank = self._by_rank(stood, steps)
        count = self.timeline.num_workers
        causes = {c: sum(of.get(c, 0.0) for of in by_rank) / count for c in ROWS}
        return Explanation(
            tuple(sorted(steps)), causes, by_rank, stood, list(chosen), self.lateness, self.costs
        )

    def _levels(self) -> list[tuple[str, Without]]:
        is_busy = bool(self.lateness.busy)
        levels = [(LATE, Without(late=self.lateness.late))]
        changes: list[tuple[str, dict[str, bool]]] = [
            (HOST, {"host": is_busy, "skew": is_busy}),
            (STARTUP, {"more_startup": True}),
            (LINK, {"more_transfer": True}),
            (ORDER, {"order": True}),
            (CODEC, {"codec": True}),
            (DEPENDENCY, {"dependency": True}),
            (TINY, {"tiny": True}),
            (STARTUP, {"startup": True}),
            (LINK, {"transfer": True}),
            (UNTOLD, {"untold": True}),
        ]
        for cause, change in changes:
            levels.append((cause, replace(levels[-1][1], **change)))  # type: ignore[arg-type]
        before = [Without(), *(without for _, without in levels)]
        return [level for level, last in zip(levels, before, strict=False) if level[1] != last]

    def _stood(self, played: Round, tiny: frozenset[Identity]) -> list[Stood]:
        plan, busy = self.timeline.plan, bool(self.lateness.busy)
        shares = [self._share(x, tiny, is_busy=busy) for x in played.exchanges]
        playback = Playback(
            played,
            shares,
            self.usual_gap_s,
            after_backward=plan is not None and plan.after_backward,
            crosses=plan is not None and plan.crosses_iteration,
        )
        levels = self._levels()
        waits_s = [playback.waits_s(without) for _, without in levels]
        found = []
        for rank, waits in enumerate(played.waits):
            measured = [w.duration_s for w in waits]
            found += [
                Stood(wait, causes)
                for wait, causes in zip(
                    waits,
                    _divided(
                        measured, [(c, w[rank]) for (c, _), w in zip(levels, waits_s, strict=True)]
                    ),
                    strict=True,
                )
            ]
        return found

    def _share(self, exchange: Exchange, tiny: frozenset[Identity], *, is_busy: bool) -> Share:
        costs = self.costs
        if identity(exchange) not in costs.sizes:
            costs = self.usual_costs
        if identity(exchange) not in costs.sizes:
            return Share(rest_s=exchange.duration_s)
        return Share.of(exchange, costs, self.usual_costs, tiny, is_busy=is_busy)

    def _by_rank(self, stood: Sequence[Stood], steps: Collection[int]) -> list[dict[str, float]]:
        """Seconds a step of each rank, with what its session counted beyond its waits."""
        waits_s: dict[tuple[int, int], float] = defaultdict(float)
        for each in stood:
            waits_s[each.wait.step, each.wait.rank] += each.wait.duration_s
        found: list[dict[str, float]] = [
            dict.fromkeys(ROWS, 0.0) for _ in range(self.timeline.num_workers)
        ]
        factors: dict[tuple[int, int], float] = {}
        for step in steps:
            counted = self.timeline.exposed_s.get(step)
            for rank in range(self.timeline.num_workers):
                mine = waits_s[step, rank]
                whole = mine if counted is None else counted[rank]
                factors[step, rank] = min(1.0, whole / mine) if mine > 0 else 1.0
                found[rank][UNKNOWN] += max(0.0, whole - mine) / len(steps)
        for each in stood:
            factor = factors[each.wait.step, each.wait.rank] / len(steps)
            for cause, seconds in each.causes_s.items():
                found[each.wait.rank][cause] += factor * seconds
        return found


def _divided(
    measured: Sequence[float], levels: Sequence[tuple[str, Sequence[float]]]
) -> list[dict[str, float]]:
    """Each wait's seconds by cause.

    A cause has what all waits together lose at its level. A wait that another one gives way to may
    grow meanwhile: then those that shrink share what is lost.
    """
    left = list(measured)
    causes: list[dict[str, float]] = [{} for _ in measured]
    least = sum(measured)
    before = list(measured)
    for cause, waits in levels:
        gain = least - sum(waits)
        if gain <= 0:
            continue
        shrunk = [max(0.0, b - w) for b, w in zip(before, waits, strict=True)]
        gain = min(gain, sum(left))
        given = _shared(gain, shrunk, left)
        for number, seconds in enumerate(given):
            if seconds > 0:
                causes[number][cause] = causes[number].get(cause, 0.0) + seconds
                left[number] -= seconds
        least, before = sum(waits), list(waits)
    for number, seconds in enumerate(left):
        causes[number][UNKNOWN] = max(0.0, seconds)
    return causes


def _shared(whole: float, weights: Sequence[float], limits: Sequence[float]) -> list[float]:
    """The whole, shared by weight, none above its limit; what is over goes where there is room."""
    total = sum(weights)
    given = [
        min(limit, whole * w / total) if total > 0 else 0.0
        for w, limit in zip(weights, limits, strict=True)
    ]
    over = whole - sum(given)
    room = [limit - g for limit, g in zip(limits, given, strict=True)]
    if over > 0 and sum(room) > 0:
        factor = min(1.0, over / sum(room))
        given = [g + factor * r for g, r in zip(given, room, strict=True)]
    return given
