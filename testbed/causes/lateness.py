"""Which rank the others wait for, and whether its host is busy with something else."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import hypot, inf, sqrt
from statistics import median

from testbed.causes.exchanges import Round
from testbed.noise.other_processes import sampled_s
from testbed.records.timeline import Timeline

LEAST_S = 2e-4  # a rank that is later by less is not called late
LEAST_SHARE = 0.02  # of the time that it computes
CERTAIN = 3.0  # standard errors of a median by which it has to be above 0, and above the usual one
TAKEN = 0.1  # share of its cores or of its time that a host takes more than usually: it is busy
SOME = 0.02  # share of its cores that others take at least where it waits for them
AWAITED = 0.25  # share of the step that a rank waits for a core, where there are no usual steps


@dataclass(frozen=True)
class Busy:
    """By what a rank's host is known to be busy with something else.

    Attributes:
        share: of its cores that others took, or of its time.
        awaited: it is the share of its time in which its computing thread waited for a core.
    """

    share: float
    awaited: bool = False


@dataclass(frozen=True)
class Lateness:
    """What is wrong with ranks in some steps.

    Attributes:
        late_s: rank -> median time by which it is late, of ranks that compute longer than others.
        busy: rank -> by what its host is known to be busy.
    """

    late_s: dict[int, float]
    busy: dict[int, Busy]

    @property
    def late(self) -> frozenset[int]:
        """Late ranks whose host is not busy."""
        return frozenset(set(self.late_s) - set(self.busy))

    def with_lasting(self, alone: Lateness, usual: Lateness) -> Lateness:
        """With ranks that are late in these steps, held against nothing, and in usual ones."""
        late_s = {rank: s for rank, s in alone.late_s.items() if rank in usual.late_s}
        return Lateness({**late_s, **self.late_s}, self.busy)


def lateness_of(timeline: Timeline, rounds: Sequence[Round], usual: Sequence[Round]) -> Lateness:
    """Late ranks and busy hosts in these steps, held against usual ones.

    A rank is late where the median of the times by which it hands messages over later than the
    middle rank is above the clocks' uncertainty, 0.2 ms and 2 % of what it computes, and 3 standard
    errors above 0 and above what it is in usual steps (one step has no error: in it a rank is late
    that was, by chance or not), and where its own time since the last
    backward pass, without waits, is longer than theirs by half of that: what was passed on to it
    by others is not its doing.

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
    computed = median(median(r.own_s) for r in rounds)
    least_s = max(sure_s, LEAST_S, LEAST_SHARE * computed)
    for rank in range(timeline.num_workers):
        late_s, error_s = _median([_late_s(r, rank) for r in rounds])
        usual_s, usual_error_s = _median([_late_s(r, rank) for r in usual])
        own_s, _ = _median([_longer_s(r, rank) for r in rounds])
        both_s = CERTAIN * hypot(error_s, usual_error_s)
        is_certain = late_s >= CERTAIN * error_s and (not usual or late_s - usual_s >= both_s)
        if late_s >= least_s and is_certain and own_s >= late_s / 2:
            late[rank] = late_s
    return Lateness(late, busy)


def _median(values: Sequence[float]) -> tuple[float, float]:
    """The median and its standard error, from the median absolute deviation; 0 of nothing."""
    if not values:
        return 0.0, 0.0
    middle = median(values)
    deviation = 1.4826 * median(abs(v - middle) for v in values)
    return middle, 1.2533 * deviation / sqrt(len(values))


def _late_s(played: Round, rank: int) -> float:
    """By how much a rank hands over later than the middle one does; the median over exchanges."""
    return median(
        x.queued_s[rank] - sorted(x.queued_s)[(len(x.queued_s) - 1) // 2]
        for x in played.exchanges
        if x.turn == 0
    )


def _longer_s(played: Round, rank: int) -> float:
    return played.own_s[rank] - sorted(played.own_s)[(len(played.own_s) - 1) // 2]


def _busy(timeline: Timeline, steps: Collection[int], usual: Collection[int]) -> dict[int, Busy]:
    found = {}
    for rank in range(timeline.num_workers):
        taken, more_taken = _taken(timeline, rank, steps, usual)
        awaited = _awaited(timeline, rank, steps)
        more_awaited = awaited - _awaited(timeline, rank, usual)
        if more_taken >= TAKEN:
            found[rank] = Busy(taken)
        elif more_taken >= SOME and more_awaited >= (TAKEN if usual else AWAITED):
            found[rank] = Busy(awaited, awaited=True)
    return found


def _taken(
    timeline: Timeline, rank: int, steps: Collection[int], usual: Collection[int]
) -> tuple[float, float]:
    """Share of the rank's cores that others took, and by how much it has certainly grown.

        share = (busy - own) / all;   grown = share - usual share - hypot(error, usual error)

    The counters tick in hundredths of a second, see `outside_share`: they are summed up before they
    are compared. Nothing is certain where they were not read.
    """
    share, error = _share(timeline, rank, steps)
    before, error_before = _share(timeline, rank, usual) if usual else (0.0, 0.0)
    return share, share - before - hypot(error, error_before)


def _share(timeline: Timeline, rank: int, steps: Collection[int]) -> tuple[float, float]:
    """Share that others took of the rank's cores, and what sampling may have made up of it."""
    read = [timeline.cores_used[step][rank] for step in steps if step in timeline.cores_used]
    busy_s, own_s, whole_s = (
        (sum(column) for column in zip(*read, strict=True)) if read else (0,) * 3
    )
    if whole_s <= 0:
        return 0.0, inf
    return (busy_s - own_s) / whole_s, sampled_s(busy_s) / whole_s


def _awaited(timeline: Timeline, rank: int, steps: Collection[int]) -> float:
    """Share of these steps in which the rank's computing thread waited for a core; the median."""
    shares = timeline.cores_awaited
    found = [shares[step][rank] for step in steps if rank < len(shares.get(step, ()))]
    return median(found) if found else 0.0
