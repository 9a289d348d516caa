"""The search for the cheapest actions of layers under a budget, on the simulator. Pure.

    score = (bytes above the budget, cost in seconds, peak in bytes), least first

Without a budget the first is the peak itself. Starts come from a dynamic program over the layers
as a chain, from the relaxed problem and from greedy choices; a local search betters them; branch
and bound proves the best where there are few layers. Every choice is scored by the simulator, and
every limit is a number of choices, so that equal inputs give equal plans.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from testbed.memory.planning.bounds import Bounds, Least, relaxed
from testbed.memory.planning.chain import Chain
from testbed.memory.planning.gradients import Levels
from testbed.memory.planning.lifetimes import (
    KEEP,
    MOVED,
    OFFLOAD,
    RECOMPUTE,
    Costs,
    Footprint,
    Lifetimes,
)
from testbed.memory.planning.simulator import Simulator
from testbed.memory.planning.units import is_cheap

MAX_EXACT_UNITS: Final = 12
MAX_TRIES: Final = 2000
MAX_VALUES: Final = 1_500_000  # of all tries
MAX_IDLE: Final = 40
MAX_NODES: Final = 12_000
NEVER: Final = (1 << 62, float("inf"), 1 << 62)

Score = tuple[int, float, int]
IterationCost = Callable[[Footprint], float]


class Found(NamedTuple):
    """A choice of one action for each layer.

    Attributes:
        letters: the actions.
        score: see the module.
        bound: what the first (no budget) or second entry of the score cannot be below.
    """

    letters: str
    score: Score
    bound: float


class Search:
    """For the best actions of a step's layers.

    Args:
        lifetimes: of the step.
        costs: of moving.
        budget_bytes: of the whole step; None: least peak.
        iteration_s: cost of a footprint; never less if everything in it takes longer.
        ways: in which a layer's values may be moved: `offload`, `offload_sync` or both.
    """

    def __init__(
        self,
        lifetimes: Lifetimes,
        costs: Costs,
        budget_bytes: int | None,
        iteration_s: IterationCost,
        ways: str = MOVED,
    ) -> None:
        self.moving, self._actions = ways[0], KEEP + RECOMPUTE + ways
        self.lifetimes, self.budget = lifetimes, budget_bytes
        self.simulator = Simulator(lifetimes, costs)
        self.bounds = Bounds(self.simulator)
        self._iteration_s = iteration_s
        self._scores: dict[str, Score] = {}
        self._peak_at: dict[str, int] = {}
        self._rejected = 0
        self._unit_of = [lifetimes.ops[value.op].unit for value in lifetimes.values]
        self.best, self.best_score = "", NEVER
        self.max_tries = min(MAX_TRIES, MAX_VALUES // max(len(lifetimes.values), 1))

    def footprint(self, letters: str) -> Footprint:
        """What actions of layers take."""
        return self.simulator.footprint(self._spread(letters))

    def costs_of(self, unit: int) -> dict[str, float]:
        """Seconds of each action of a layer, were it alone."""
        return {action: seconds[unit] for action, seconds in self._costs.items()}

    def _spread(self, letters: str) -> str:
        return np.frombuffer(letters.encode(), dtype=np.uint8)[self._unit_of].tobytes().decode()

    def score(self, letters: str) -> Score:
        """Of actions of layers; the best one is remembered."""
        if letters not in self._scores:
            found = self.footprint(letters)
            excess = max(0, found.peak_bytes - (self.budget or 0))
            score = (excess, self._iteration_s(found), found.peak_bytes)
            self._scores[letters], self._peak_at[letters] = score, found.position
            if score < self.best_score:
                self.best, self.best_score = letters, score
        return self._scores[letters]

    def run(self, starts: Iterable[str] = ()) -> Found:
        """The best choice that is found, with what bounds it.

        If none fits, it is not searched for long: the search without a budget finds the least.

        Args:
            starts: choices that are known already.
        """
        num_units = len(self.lifetimes.units)
        for letters in (*starts, *self._plain_starts()):
            self.score(letters)
        is_proven = num_units <= MAX_EXACT_UNITS and self._branch_and_bound()
        is_free = self.budget is not None and self.best_score[:2] <= (0, self._least_cost(0.0))
        if is_proven or is_free:
            return Found(self.best, self.best_score, self._own_bound())
        least = relaxed(self.bounds, self.budget)
        for letters in (*self._starts(), *([least.letters] if least and least.letters else ())):
            self._repaired(letters.replace(OFFLOAD, self.moving))
        if self.budget is None or self.best_score[0] == 0:
            self._improve()
        return Found(self.best, self.best_score, self._bound(least))

    # Starts

    def _plain_starts(self) -> Iterator[str]:
        num_units = len(self.lifetimes.units)
        yield from (action * num_units for action in self._actions)
        costly = {op.unit for op in self.lifetimes.ops if not is_cheap(op.name)}
        for action in (KEEP, self.moving):
            yield "".join(action if unit in costly else RECOMPUTE for unit in range(num_units))

    def _starts(self) -> Iterator[str]:
        keep_all = KEEP * len(self.lifetimes.units)
        floor = int(self.bounds.least.max(initial=0))
        chain = Chain(self.bounds)
        if self.budget is None:
            yield from chain.least_peaks(floor, self.score(keep_all)[2])
        else:
            for percent in (100, 95, 90, 80, 65):
                letters = chain.cheapest(floor + (self.budget - floor) * percent // 100)
                if letters is not None:
                    yield letters
        yield keep_all

    @cached_property
    def _kept(self) -> Levels:
        """Bytes at each position (second axis) if a layer (first axis) is kept."""
        return np.array(
            [self.bounds.keeping(np.array(n, dtype=np.int64)) for n in self.bounds.units]
        )

    @cached_property
    def _costs(self) -> dict[str, list[float]]:
        """Seconds of each action of each layer, were it alone."""
        num_units = len(self.lifetimes.units)
        run_s, move_s = [0.0] * num_units, [0.0] * num_units
        for op in self.lifetimes.ops:
            run_s[op.unit] += op.time_s
        for unit, numbers in enumerate(self.bounds.units):
            move_s[unit] = float(self.bounds.move_s[np.array(numbers, dtype=np.int64)].sum())
        return {KEEP: [0.0] * num_units, RECOMPUTE: run_s, **dict.fromkeys(MOVED, move_s)}

    def _repaired(self, letters: str) -> str:
        """Until it fits, give up what is kept at the peak for the fewest seconds a byte."""
        costs = self._costs
        for _ in range(len(letters) + 1):  # each round gives up one
            self.score(letters)
            if self._scores[letters][2] <= self._allowed():
                break
            frees = self._kept[:, self._peak_at[letters]].tolist()
            options = [
                (costs[action][unit] / frees[unit], unit, action)
                for unit, letter in enumerate(letters)
                if letter == KEEP and frees[unit] > 0
                for action in (RECOMPUTE, self.moving)
            ]
            if not options:
                break
            _, unit, action = min(options)
            letters = _with(letters, unit, action)
        return letters

    def _allowed(self) -> int:
        """Peak of what is worth a look: the budget, and as long as nothing fits the least one."""
        return self.best_score[2] if self.best_score[0] else self.budget or 0

    # Local search

    def _improve(self) -> None:
        """Change layers one by one; then keep a stretch of them, repair that, and so on."""
        limit = self._tries() + self.max_tries
        while self._flip(limit):
            pass
        chance = random.Random(0)
        num_units, idle = len(self.best), 0
        while self._tries() < limit and idle < MAX_IDLE:
            length = min(num_units, chance.choice((1, 2, 4, 8, 16)))
            begin = chance.randrange(num_units - length + 1)
            action = chance.choice(KEEP + self._actions)
            letters = self.best[:begin] + action * length + self.best[begin + length :]
            scored = len(self._scores)
            self._pruned(self._repaired(letters), chance, limit)
            idle = 0 if len(self._scores) > scored else idle + 1

    def _tries(self) -> int:
        return len(self._scores) + self._rejected // 4

    def _flip(self, limit: int) -> bool:
        """Another action for one layer, those that cost most first."""
        before, costs = self.best_score, self._costs
        for unit in sorted(range(len(self.best)), key=lambda u: -costs[self.best[u]][u]):
            for action in self._actions:
                if self._tries() >= limit:
                    return False
                if action != self.best[unit]:
                    self._is_worth(_with(self.best, unit, action))
        return self.best_score < before

    def _pruned(self, letters: str, chance: random.Random, limit: int) -> None:
        """Keep again, in any order, what need not be given up."""
        paying = [unit for unit, action in enumerate(letters) if action != KEEP]
        chance.shuffle(paying)
        for unit in paying:
            if self._tries() >= limit:
                return
            other = _with(letters, unit, KEEP)
            if self._is_worth(other) and self._scores[other] < self._scores[letters]:
                letters = other

    def _is_worth(self, letters: str) -> bool:
        """Score a choice, unless a bound tells that it takes too much; whether it was."""
        if letters in self._scores:
            return True
        actions = self.simulator.settled(self._spread(letters))
        if int(self.bounds.level(actions).max()) > self._allowed():
            self._rejected += 1
            return False
        self.score(letters)
        return True

    # Branch and bound

    def _branch_and_bound(self) -> bool:
        """Whether all choices were looked at or are bounded; the best is then the best there is."""
        num_units = len(self.lifetimes.units)
        left = [""]
        for _ in range(MAX_NODES):
            if not left:
                return True
            letters = left.pop()
            if len(letters) == num_units:
                self.score(letters)
            elif self._may_be_better(letters):
                left += [letters + action for action in reversed(self._actions)]
        return not left

    def _may_be_better(self, letters: str) -> bool:
        """Whether the bounds allow that a choice that begins with these actions is the best.

        A layer that is not decided frees most if it is made again, and takes least time if kept.
        """
        open_units = len(self.lifetimes.units) - len(letters)
        freest = self.simulator.settled(self._spread(letters + RECOMPUTE * open_units))
        decided = self._spread(KEEP * len(letters) + RECOMPUTE * open_units)
        kept = "".join(
            action if is_decided == KEEP else RECOMPUTE
            for action, is_decided in zip(freest, decided, strict=True)
        )
        peak = int(self.bounds.level(kept).max())
        excess = max(0, peak - (self.budget or 0))
        if excess > self.best_score[0]:
            return False
        least = self.simulator.settled(self._spread(letters + KEEP * open_units))
        return (excess, self._least_cost(self.bounds.extra_s(least))) < self.best_score[:2]

    def _least_cost(self, extra_s: float) -> float:
        """Cost of a step that takes this much longer, with every gradient as early as it can be."""
        step = self.lifetimes
        ready = tuple(step.time_s[g.position] for g in step.gradients) if step.time_s else ()
        return self._iteration_s(
            Footprint(
                peak_bytes=0,
                position=0,
                activation_bytes=0,
                gradient_bytes=0,
                temporary_bytes=0,
                exchange_bytes=0,
                extra_s=extra_s,
                recomputed_s=0.0,
                moved_bytes=0,
                ready_s=ready,
            )
        )

    def _own_bound(self) -> float:
        return self.best_score[0 if self.budget is None else 1]

    def _bound(self, least: Least | None) -> float:
        if self.budget is None:
            return float(least.peak_bytes if least is not None else 0)
        return self._least_cost(least.extra_s if least is not None else 0.0)


def _with(letters: str, unit: int, action: str) -> str:
    return letters[:unit] + action + letters[unit + 1 :]
