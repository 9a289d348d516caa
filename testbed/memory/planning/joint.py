"""A memory plan and a schedule that are planned for each other. Pure.

Making activations again and moving them changes when gradients are ready, and so which messages
are best; the messages decide what a later gradient costs, and so which activations to give up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from testbed.memory.planning.lifetimes import Footprint, Lifetimes
from testbed.memory.planning.plan import MemoryPlan
from testbed.memory.planning.search import IterationCost

Schedule = TypeVar("Schedule")
MAX_ROUNDS: Final = 4


@dataclass(frozen=True)
class Joint(Generic[Schedule]):
    """A memory plan with the schedule that was planned on its profile.

    Attributes:
        plan: of memory.
        schedule: of communication.
        iteration_s: predicted with both.
        rounds_s: predicted iteration of each pair that was looked at, in turn; the first is that
            of both planned alone.
    """

    plan: MemoryPlan
    schedule: Schedule
    iteration_s: float
    rounds_s: tuple[float, ...]


def ready_s_by_name(lifetimes: Lifetimes, footprint: Footprint) -> dict[str, float]:
    """When the gradient of each parameter is ready, in seconds from the beginning of the step."""
    names = [gradient.name for gradient in lifetimes.gradients]
    return dict(zip(names, footprint.ready_s, strict=True)) if footprint.ready_s else {}


def late_s(lifetimes: Lifetimes, untouched: Footprint, footprint: Footprint) -> dict[str, float]:
    """By how much later each gradient is ready than without any memory plan, in seconds."""
    first_s = ready_s_by_name(lifetimes, untouched)
    now_s = ready_s_by_name(lifetimes, footprint)
    return {name: now_s[name] - first_s[name] for name in first_s}


def plan_jointly(
    choose: Callable[[IterationCost | None], MemoryPlan],
    footprint_of: Callable[[MemoryPlan], Footprint],
    schedule_for: Callable[[Footprint], Schedule],
    iteration_s: Callable[[Schedule, Footprint], float],
    untouched: Footprint,
    max_rounds: int = MAX_ROUNDS,
) -> Joint[Schedule]:
    """Plan memory and communication in turn, each on what the other has planned.

        schedule_0 = schedule_for(untouched)        plan_0 = choose(extra seconds)
        plan_i = choose(f -> iteration_s(schedule_i-1, f))
        schedule_i = schedule_for(footprint_of(plan_i))

    from plan_0 and from schedule_0, until a plan comes a second time or `max_rounds` are over; the
    best pair is taken. No pair is worse than both planned alone, which is the first; whether there
    is a better one than the best of these is not known.

    Args:
        choose: a memory plan from the seconds that a footprint costs; None: its `extra_s`.
        footprint_of: what a memory plan takes, as simulated.
        schedule_for: a schedule from when gradients are ready (`ready_s`, in seconds).
        iteration_s: seconds of an iteration with this schedule and this footprint.
        untouched: footprint without any memory plan.
        max_rounds: from each of the two starts.

    Raises:
        UsageError: whatever `choose` and the others raise, such as that nothing fits.

    Example:
        >>> def footprint(ready_s: float) -> Footprint:
        ...     return Footprint(peak_bytes=0, position=0, activation_bytes=0, gradient_bytes=0,
        ...                      exchange_bytes=0,
        ...                      temporary_bytes=0, extra_s=ready_s, recomputed_s=0.0,
        ...                      moved_bytes=0, ready_s=(ready_s,))
        >>> plans = {name: footprint(s) for name, s in (("early", 2.0), ("late", 1.0))}
        >>> best = plan_jointly(
        ...     lambda cost: MemoryPlan(strategy=min(
        ...         plans, key=lambda name: (cost or (lambda f: f.extra_s))(plans[name]))),
        ...     lambda plan: plans[plan.strategy],
        ...     lambda footprint: footprint.ready_s[0],
        ...     lambda sends_s, footprint: max(sends_s, footprint.ready_s[0]) + 1.0,
        ...     footprint(0.0))
        >>> best.plan.strategy, best.schedule, best.iteration_s
        ('late', 0.0, 2.0)

    Reference:
        Ours; after Zhao, Liu, Wang and Feng, 2021, IEEE Access 9 (LaySA), whose abstract has memory
        reuse and sparse communication together and no such planning in turn.
    """
    pairs: list[tuple[float, MemoryPlan, Schedule]] = []

    def weigh(plan: MemoryPlan, schedule: Schedule) -> None:
        pairs.append((iteration_s(schedule, footprint_of(plan)), plan, schedule))

    def with_schedule(schedule: Schedule) -> IterationCost:
        return lambda footprint: iteration_s(schedule, footprint)

    def alternate(schedule: Schedule) -> None:
        seen: set[str] = set()
        for _ in range(max_rounds):
            plan = choose(with_schedule(schedule))
            weigh(plan, schedule)
            if plan.digest() in seen:
                return
            seen.add(plan.digest())
            schedule = schedule_for(footprint_of(plan))
            weigh(plan, schedule)

    alone, first = choose(None), schedule_for(untouched)
    weigh(alone, first)
    after = schedule_for(footprint_of(alone))
    weigh(alone, after)
    alternate(after)
    alternate(first)
    best_s, plan, schedule = min(pairs, key=lambda pair: pair[0])
    return Joint(plan, schedule, best_s, tuple(seconds for seconds, _, _ in pairs))
