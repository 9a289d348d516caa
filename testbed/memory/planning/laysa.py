"""LaySA's choice for activations: keep, recompute or offload, layer by layer. Pure."""

from __future__ import annotations

import math

from testbed.base.errors import UsageError
from testbed.base.units import format_bytes, format_seconds
from testbed.memory.planning.lifetimes import (
    KEEP,
    MOVED,
    OFFLOAD,
    OFFLOAD_SYNC,
    RECOMPUTE,
    Costs,
    Footprint,
    Lifetimes,
)
from testbed.memory.planning.plan import MemoryPlan, plan_of, unit_choices
from testbed.memory.planning.search import Found, IterationCost, Search
from testbed.memory.planning.units import MAX_UNITS, blocks, saved_bytes, spread


class DoesNotFit(UsageError):
    """No choice of actions fits a budget.

    Attributes:
        budget_bytes: that was given.
        smallest_bytes: the smallest budget that would do.
        plan: that reaches it, with `held_bytes` beside it.
    """

    def __init__(self, budget_bytes: int, plan: MemoryPlan, held_bytes: int = 0) -> None:
        self.budget_bytes, self.plan = budget_bytes, plan
        self.smallest_bytes = plan.peak_bytes + held_bytes
        beside = f"; {format_bytes(held_bytes)} beside the plan" if held_bytes else ""
        super().__init__(
            f"a budget of {format_bytes(budget_bytes)} was given; the least that a step takes is "
            f"{math.ceil(self.smallest_bytes / 2**20)} MiB ({plan.why}{beside}); give at least "
            "that, or a smaller batch or model"
        )

    def beside(self, held_bytes: int) -> DoesNotFit:
        """The same of a whole that holds more than what was planned."""
        return DoesNotFit(self.budget_bytes + held_bytes, self.plan, held_bytes)


def laysa(
    lifetimes: Lifetimes,
    costs: Costs | None = None,
    budget_bytes: int | None = None,
    iteration_s: IterationCost | None = None,
    at_most: int = MAX_UNITS,
) -> MemoryPlan:
    """Choose for each layer what becomes of the activations that it makes.

        min  iteration_s(footprint(a))  over a in {keep, recompute, offload, offload_sync}^layers
        so that  peak_bytes(footprint(a)) <= budget_bytes

    or, without a budget, the least peak, and of these choices a cheap one. `offload_sync` moves a
    layer in step with the computation, where copies beside it leave no room. The footprint comes
    from `planning.simulator`: what is made again has its sources, and its whole segment, beside it;
    copies share the link to the host with each other and take a share of the computing thread's
    time.

    The choice is the best there is where the plan's `gap` is 0: with few layers by branch and
    bound, with many where the bound of a relaxed problem (`planning.bounds`) is met. Else `gap` is
    the distance from that bound.

    Args:
        lifetimes: of a recorded step.
        costs: rate of the link to the host in bytes/s, and what becomes of gradients.
        budget_bytes: largest peak, weights, gradients and optimizer state included; None: the
            least peak is wanted.
        iteration_s: seconds of the whole iteration from a footprint, for instance of a scheduler
            that plans with the moments at which gradients are ready; never less where all of them
            and `extra_s` are larger. None: `extra_s` itself.
        at_most: number of layers that are told apart; neighbours are merged to blocks above.

    Raises:
        DoesNotFit, UsageError: nothing fits the budget; tells the smallest that would do.

    Example:
        >>> from testbed.memory.planning.lifetimes import ForwardOp, Use, Value
        >>> ops = tuple(ForwardOp(name="f", unit=u, time_s=s) for u, s in ((0, 3.0), (1, 1.0)))
        >>> values = tuple(
        ...     Value(num_bytes=8, op=op, born=op, dies=op + 1,
        ...           uses=(Use(packed=op, unpacked=5 - op, released=6 - op),)) for op in (0, 1))
        >>> step = Lifetimes(units=("a", "b"), ops=ops, values=values, base=(0, 0, 8, 0, 0, 0, 0))
        >>> plan = laysa(step, Costs(host_bytes_per_s=1.0), budget_bytes=16)
        >>> plan.peak_bytes, plan.extra_s, [choice.action for choice in plan.units]
        (16, 1.0, ['keep', 'recompute'])

    Reference:
        Zhao, Liu, Wang and Feng, 2021, IEEE Access 9 (LaySA). Departs: how it chooses is not
        published; here a step is recorded and simulated, and the choice is searched on that.
    """
    step = blocks(lifetimes, at_most)
    costs = costs or Costs()
    cost = iteration_s or _extra_s
    search = Search(step, costs, budget_bytes, cost)
    if budget_bytes is not None:
        found = search.run()
        if found.score[0] == 0:
            return _plan(search, found, found.letters)
    smallest = Search(step, costs, None, cost, OFFLOAD_SYNC)
    least = smallest.run()
    if budget_bytes is None:
        return _plan(smallest, least, _hastened(smallest, least, least.score[0]))
    if least.score[0] > budget_bytes:
        raise DoesNotFit(budget_bytes, _plan(smallest, least, least.letters))
    found = search.run([least.letters])
    return _plan(search, found, found.letters)


def _hastened(search: Search, found: Found, budget_bytes: int) -> str:
    """The choice with copies beside the computation, of those layers where there is room for it."""
    letters = found.letters
    for unit, letter in enumerate(letters):
        if letter == OFFLOAD_SYNC:
            other = letters[:unit] + OFFLOAD + letters[unit + 1 :]
            footprint = search.footprint(other)
            if footprint.peak_bytes <= budget_bytes:
                letters = other
    return letters


def _extra_s(footprint: Footprint) -> float:
    return footprint.extra_s


def _plan(search: Search, found: Found, letters: str) -> MemoryPlan:
    step = search.lifetimes
    footprint = search.footprint(letters)
    wanted = found.score[0] if search.budget is None else found.score[1]
    gap = max(0.0, 1.0 - found.bound / wanted) if wanted > 0 else 0.0
    actions = spread(step, letters)
    units = unit_choices(step, actions, _Reasons(search, letters, footprint).of)
    return plan_of(
        "laysa",
        step,
        actions,
        footprint,
        units,
        gap=gap,
        why=_summary([choice.action for choice in units], footprint, search, gap),
    )


def _summary(actions: list[str], footprint: Footprint, search: Search, gap: float) -> str:
    counts = ", ".join(f"{actions.count(a)} {a}" for a in dict.fromkeys(actions))
    budget = search.budget
    wanted = "least peak" if budget is None else f"budget {format_bytes(budget)}"
    step_s = search.lifetimes.time_s[-1] if search.lifetimes.time_s else 0.0
    share = f" ({footprint.extra_s / step_s:.1%} of a step)" if step_s else ""
    best = "the best there is" if gap <= 0.0 else f"a better one saves at most {gap:.1%} of that"
    return (
        f"{len(actions)} layers or blocks: {counts}; {wanted}: peak "
        f"{format_bytes(footprint.peak_bytes)}, {format_seconds(footprint.extra_s)} more{share}, "
        f"{format_bytes(footprint.moved_bytes)} to the host and back; {best}"
    )


class _Reasons:
    """Why a layer's action was chosen: what the others would take."""

    def __init__(self, search: Search, letters: str, footprint: Footprint) -> None:
        self._search, self._letters, self._footprint = search, letters, footprint
        self._values = search.bounds.units

    def of(self, unit: int) -> str:
        """The reason for one layer."""
        letter = self._letters[unit]
        if not saved_bytes(self._search.lifetimes, self._values[unit]):
            return "saves nothing"
        if letter == KEEP:
            costs = self._search.costs_of(unit)
            return (
                f"fits; recomputing would take {format_seconds(costs[RECOMPUTE])}, "
                f"moving {format_seconds(costs[OFFLOAD])}"
            )
        other = RECOMPUTE if letter in MOVED else self._search.moving
        words = {KEEP: "kept", RECOMPUTE: "recomputed", **dict.fromkeys(MOVED, "moved")}
        return "; ".join(self._told(unit, action, words[action]) for action in (KEEP, other))

    def _told(self, unit: int, action: str, word: str) -> str:
        """What a step would take if this layer's action were another one."""
        letters = self._letters[:unit] + action + self._letters[unit + 1 :]
        found = self._search.footprint(letters)
        later_s = found.extra_s - self._footprint.extra_s
        higher = found.peak_bytes - self._footprint.peak_bytes
        return (
            f"{word} instead: peak {_signed(format_bytes(abs(higher)), higher)}, "
            f"step {_signed(format_seconds(abs(later_s)), later_s)}"
        )


def _signed(text: str, value: float) -> str:
    return f"{'-' if value < 0 else '+'}{text}"
