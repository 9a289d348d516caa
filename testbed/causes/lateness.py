"""Which rank the others wait for, and whether its host is busy with something else."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median

from testbed.causes.exchanges import Round
from testbed.records.timeline import Timeline

LEAST_S = 2e-4  # a rank that is later by less is not called late
LEAST_SHARE = 0.02  # of the time that it computes
MOST_STEPS = 0.75  # share of the steps in which a rank has to be late
TAKEN = 0.1  # share of the cores that others take more than usually: the host is busy
FULL = 0.9  # cores that are busy so much, and 0.15 more than usually, are busy
MORE_BUSY = 0.15


@dataclass(frozen=True)
class Lateness:
    """What is wrong with ranks in some steps.

    Attributes:
        late_s: rank -> median time by which it is late, of ranks that compute longer than others.
        busy: rank -> share of its cores that was taken, or by which they were busier.
    """

    late_s: dict[int, float]
    busy: dict[int, float]

    @property
    def late(self) -> frozenset[int]:
        """Late ranks whose host is not busy."""
        return frozenset(set(self.late_s) - set(self.busy))


def lateness_of(timeline: Timeline, rounds: Sequence[Round], usual: Sequence[Round]) -> Lateness:
    """Late ranks and busy hosts in these steps, held against usual ones.

    A rank is late where, in three of four steps, it hands messages over later than the middle rank
    does, by more than the clocks' uncertainty and what the steps vary by, and its own time since
    the last backward pass, without waits, is longer by at least half of that: what was passed on to
    it by others is not its doing.

    Args:
        timeline: that the steps are of.
        rounds: to be explained.
        usual: others of the same run; empty: none.
    """
    steps = [r.step for r in rounds]
    busy = _busy(timeline, steps, [r.step for r in usual])
    if timeline.num_workers < 2:
        return Lateness({}, busy)
    sure_s = 2 * max((c.uncertainty_s for c in timeline.clocks), default=0.0)
    late: dict[int, float] = {}
    for rank in range(timeline.num_workers):
        found = [_late_s(r, rank) for r in rounds]
        own = [_longer_s(r, rank) for r in rounds]
        computed = median(median(r.own_s) for r in rounds)
        least_s = max(sure_s, LEAST_S, LEAST_SHARE * computed) * (1 + 2 / sqrt(len(rounds)))
        share = sum(late_s > least_s for late_s in found) / len(found)
        if share >= MOST_STEPS and median(own) >= median(found) / 2:
            late[rank] = median(found)
    return Lateness(late, busy)


def _late_s(played: Round, rank: int) -> float:
    """By how much a rank hands over later than the middle one does; the median over exchanges."""
    return median(
        x.queued_s[rank] - sorted(x.queued_s)[(len(x.queued_s) - 1) // 2]
        for x in played.exchanges
        if x.turn == 0
    )


def _longer_s(played: Round, rank: int) -> float:
    return played.own_s[rank] - sorted(played.own_s)[(len(played.own_s) - 1) // 2]


def _busy(timeline: Timeline, steps: Collection[int], usual: Collection[int]) -> dict[int, float]:
    found = {}
    for rank in range(timeline.num_workers):
        taken = _middle(timeline.cores_taken, rank, steps)
        more_taken = taken - _middle(timeline.cores_taken, rank, usual)
        busy = _middle(timeline.cores_busy, rank, steps)
        more_busy = busy - _middle(timeline.cores_busy, rank, usual) if usual else 0.0
        if more_taken >= TAKEN:
            found[rank] = taken
        elif busy >= FULL and more_busy >= MORE_BUSY:
            found[rank] = busy
    return found


def _middle(shares: dict[int, list[float]], rank: int, steps: Collection[int]) -> float:
    found = [shares[step][rank] for step in steps if rank < len(shares.get(step, ()))]
    return median(found) if found else 0.0
