"""Arms and trials of `loss-compressed`: each arm's learning rate by one rule, then all seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from testbed.studies.accuracy.trials import Done, Outcome, Trial

DENSE = "dense"
EVERY = 10  # steps from one judging to the next


@dataclass(frozen=True)
class Arm:
    """One row of the table.

    Attributes:
        name: of the row.
        compressor: its specification.
        momentum: of the optimizer.
        departs: what is set otherwise than its authors had it; empty: nothing.
    """

    name: str
    compressor: str
    momentum: float = 0.9
    departs: str = ""


FIXED_WIDTH = "codes of fixed width, not Elias's"
SCALES = "a scale for 512 values, not for a layer"
MOMENTUM = "momentum of what comes back, where they had none"  # Stich, 2018; Karimireddy, 2019
ARMS = (
    Arm(DENSE, "none"),
    Arm("dense, no momentum", "none", momentum=0.0),
    Arm("fp16", "fp16", departs="no loss scaling"),
    Arm("bf16", "bf16"),
    Arm("qsgd 8 bit", "qsgd:bits=8,norm=max", departs=FIXED_WIDTH),
    Arm("qsgd 2 bit", "qsgd:bits=2,norm=max", departs=FIXED_WIDTH),
    Arm("topk 1 %, ef", "ef+topk:ratio=0.01", departs=MOMENTUM),
    Arm("topk 1 %, ef, no momentum", "ef+topk:ratio=0.01", momentum=0.0),
    Arm("topk 1 %, no ef", "topk:ratio=0.01", departs="no memory of what was not sent"),
    # It carries the momentum itself; ten steps at each of its three higher densities.
    Arm(
        "dgc 1 %",
        "dgc:ratio=0.01,momentum=0.9,warmup_steps=10",
        momentum=0.0,
        departs="1 % sent, not 0.1 %; 10 steps at each density of the warm-up, not an epoch; no "
        "clipping; no Nesterov term",
    ),
    Arm("ef-sign", "ef-sign", departs=f"{SCALES}; {MOMENTUM}"),
    Arm("ef-sign, no momentum", "ef-sign", momentum=0.0, departs=SCALES),
    Arm(
        "sign, no ef",
        "sign:vote=0,scaled=1",
        departs="mean of scaled signs, not the majority's sign",
    ),
    Arm("onebit, ef", "ef+onebit", departs="means of 512 values, not of a matrix's columns"),
    Arm("powersgd rank 4", "powersgd:rank=4"),
)
OF_MANY = (DENSE, "bf16", "topk 1 %, ef, no momentum", "dgc 1 %", "ef-sign, no momentum")


@dataclass(frozen=True)
class Search:
    """How the learning rate of each arm is searched: the same rule for all.

    Three rates a factor of 2 apart; while the best is the lowest or the highest, one more on that
    side; then halves of the steps beside the best, up to `budget` rates. Where the best is still at
    the edge then, it is gone on with up to `most`.

    Attributes:
        middle: rate to begin around.
        budget: rates that are tried for each arm.
        most: rates at which the search ends, whatever is found.

    Example:
        >>> search = Search(middle=0.1, budget=5)
        >>> search.next({})
        (0.05, 0.1, 0.2)
        >>> search.next({0.05: 2.0, 0.1: 1.8, 0.2: 1.7})
        (0.4,)
        >>> search.next({0.05: 2.0, 0.1: 1.8, 0.2: 1.7, 0.4: 1.9})
        (0.141421,)
        >>> search.next({0.05: 2.0, 0.1: 1.8, 0.2: 1.7, 0.4: 1.9, 0.141421: 1.75})
        ()
    """

    middle: float
    budget: int = 6
    most: int = 9

    def next(self, losses: Mapping[float, float]) -> tuple[float, ...]:
        """Rates to try next; none: the search is over.

        Args:
            losses: of the rates that were tried; infinite where one diverged.
        """
        first = tuple(_rounded(self.middle * factor) for factor in (0.5, 1.0, 2.0))
        if missing := tuple(rate for rate in first if rate not in losses):
            return missing
        rates, best = sorted(losses), best_rate(losses)
        edge = self.at_edge(losses)
        if edge and len(rates) < self.most:
            return (_rounded(best * (0.5 if best == rates[0] else 2.0)),)
        if edge or len(rates) >= self.budget:
            return ()
        place = rates.index(best)
        below, above = rates[place - 1], rates[place + 1]
        wider = (below, best) if best / below >= above / best else (best, above)
        return (_rounded(math.sqrt(wider[0] * wider[1])),)

    def at_edge(self, losses: Mapping[float, float]) -> bool:
        """Whether the best rate is the lowest or the highest that was tried."""
        return best_rate(losses) in (min(losses), max(losses))


def best_rate(losses: Mapping[float, float]) -> float:
    """The rate with the lowest loss; of equal ones the lowest.

    Example:
        >>> best_rate({0.2: 1.0, 0.1: 1.0, 0.4: float("inf")})
        0.1
    """
    return min(sorted(losses), key=lambda rate: losses[rate])


def _rounded(rate: float) -> float:
    return float(f"{rate:.6g}")


def _base() -> Trial:
    return Trial(
        method="",
        compressor="none",
        learning_rate=0.1,
        momentum=0.9,
        seed=0,
        part="final",
        workload="byte-gpt",
        batch_size=4,
        epochs=0,
        steps=300,
        warmup_steps=20,
        evaluate_every=EVERY,
    )


@dataclass(frozen=True)
class Comparison:
    """What is compared, and how thoroughly.

    Attributes:
        arms: dense first.
        search: of each arm's rate.
        search_seed: of the search, none of the final ones.
        seeds: of the final runs.
        many: workers of the runs at the rates that were found with those of `base`; 0: none.
        many_arms: of these runs.
        many_seeds: of these runs.
        base: what all trials have in common.
    """

    arms: tuple[Arm, ...] = ARMS
    search: Search = Search(0.03)
    search_seed: int = 100
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    many: int = 16
    many_arms: tuple[str, ...] = OF_MANY
    many_seeds: tuple[int, ...] = (1, 2, 3)
    base: Trial = field(default_factory=_base)

    def wanted(self, done: Done) -> list[Trial]:
        """The search, then a seed of all arms after the other, then the runs with many workers."""
        searched = {arm: self.searched(arm, done) for arm in self.arms}
        found = [trial for arm in self.arms for trial in searched[arm].values()]
        rates: dict[Arm, float] = {}
        for arm, trials in searched.items():
            losses = self.losses(arm, done)
            if len(losses) < len(trials):
                continue
            more = self.search.next(losses)
            found += [self._trial(arm, rate, self.search_seed, "search") for rate in more]
            if not more:
                rates[arm] = best_rate(losses)
        for workers, seeds in ((self.base.workers, self.seeds), (self.many, self.many_seeds)):
            found += [
                self.final(arm, rate, seed, workers)
                for seed in seeds
                for arm, rate in rates.items()
                if workers == self.base.workers or (workers and arm.name in self.many_arms)
            ]
        return found

    def searched(self, arm: Arm, done: Done) -> dict[float, Trial]:
        """Rate -> trial of an arm's search: those that are done, and the first ones."""
        like = self._trial(arm, self.base.learning_rate, self.search_seed, "search")
        tried = {t.learning_rate for t in done if t == _at(like, t.learning_rate)}
        return {rate: _at(like, rate) for rate in (*self.search.next({}), *sorted(tried))}

    def losses(self, arm: Arm, done: Done) -> dict[float, float]:
        """Rate -> held-out loss of what is done of an arm's search."""
        trials = self.searched(arm, done).items()
        return {rate: done[trial].judged_loss for rate, trial in trials if trial in done}

    def final(self, arm: Arm, rate: float, seed: int, workers: int) -> Trial:
        """One of an arm's runs at its rate."""
        trial = self._trial(arm, rate, seed, "final")
        return msgspec.structs.replace(trial, workers=workers)

    def finals(self, arm: Arm, done: Done, workers: int) -> dict[int, Outcome]:
        """Seed -> what is done of an arm's runs with so many workers."""
        losses = self.losses(arm, done)
        if len(losses) < 3 or self.search.next(losses):
            return {}
        seeds = self.seeds if workers == self.base.workers else self.many_seeds
        trials = {s: self.final(arm, best_rate(losses), s, workers) for s in seeds}
        return {seed: done[trial] for seed, trial in trials.items() if trial in done}

    def _trial(self, arm: Arm, rate: float, seed: int, part: str) -> Trial:
        searching = part == "search"
        trial: Trial = msgspec.structs.replace(
            self.base,
            method=arm.name,
            compressor=arm.compressor,
            learning_rate=rate,
            momentum=arm.momentum,
            seed=seed,
            part=part,
            evaluate_every=self.base.steps if searching else self.base.evaluate_every,
        )
        return trial


def _at(trial: Trial, rate: float) -> Trial:
    return msgspec.structs.replace(trial, learning_rate=rate)
