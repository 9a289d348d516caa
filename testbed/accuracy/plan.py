"""Which trials are to be run: first the search, then the best rate of each method on all seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from testbed.accuracy.methods import Method
from testbed.accuracy.trial import Outcome, Trial

Done = Mapping[Trial, Outcome]


def _plain() -> Trial:
    return Trial(
        method="", compressor="none", learning_rate=0.1, momentum=0.0, seed=0, part="final"
    )


@dataclass(frozen=True)
class Comparison:
    """What is compared, and how thoroughly.

    Attributes:
        methods: dense first.
        search_seeds: seeds of the search, none of the final ones.
        seeds: of the final runs.
        base: what all trials have in common.
    """

    methods: tuple[Method, ...]
    search_seeds: tuple[int, ...] = (100, 101)
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5, 6)
    base: Trial = field(default_factory=_plain)

    def search(self) -> list[Trial]:
        """All trials of the search."""
        return [t for m in self.methods if m.settings_of is None for t in self.search_of(m)]

    def search_of(self, method: Method) -> list[Trial]:
        """One method's search, each setting with each seed; or that of the method it names."""
        method = self._searched(method)
        return [
            self._trial(method, rate, momentum, seed, "search")
            for rate, momentum in method.settings()
            for seed in self.search_seeds
        ]

    def final(self, done: Done) -> list[Trial]:
        """The final trials of the methods whose search is complete."""
        return [
            self._trial(method, best.learning_rate, best.momentum, seed, "final")
            for method in self.methods
            if (best := best_setting([done.get(t) for t in self.search_of(method)])) is not None
            for seed in self.seeds
        ]

    def _searched(self, method: Method) -> Method:
        if method.settings_of is None:
            return method
        (searched,) = (m for m in self.methods if m.name == method.settings_of)
        return searched

    def _trial(self, method: Method, rate: float, momentum: float, seed: int, part: str) -> Trial:
        trial: Trial = msgspec.structs.replace(
            self.base,
            method=method.name,
            compressor=method.compressor,
            learning_rate=rate,
            momentum=momentum,
            seed=seed,
            part=part,
        )
        return trial


def best_setting(searched: Sequence[Outcome | None]) -> Trial | None:
    """The setting with the highest mean accuracy on the samples held out; None while one lacks.

    Ties: the lower training loss; then the setting that was named first. A setting that diverged
    with any seed is never chosen over one that did not.

    Example:
        >>> trial = Trial(method="m", compressor="none", learning_rate=0.1, momentum=0.0, seed=1,
        ...               part="search")
        >>> def seen(rate: float, accuracy: float) -> Outcome:
        ...     return Outcome(trial=msgspec.structs.replace(trial, learning_rate=rate),
        ...                    accuracy=accuracy, loss=0.1, steps=1, dense_bytes=4, sent_bytes=4,
        ...                    state_bytes=0, cpu_s=1.0)
        >>> best_setting([seen(0.1, 0.9), seen(0.2, 0.95)]).learning_rate
        0.2
        >>> best_setting([seen(0.1, 0.9), None]) is None
        True
    """
    outcomes = [outcome for outcome in searched if outcome is not None]
    if len(outcomes) < len(searched) or not outcomes:
        return None
    groups: dict[tuple[float, float], list[Outcome]] = {}
    for outcome in outcomes:
        key = (outcome.trial.learning_rate, outcome.trial.momentum)
        groups.setdefault(key, []).append(outcome)

    def merit(group: list[Outcome]) -> tuple[bool, float, float]:
        losses = [o.loss for o in group if o.loss is not None]
        return (
            not any(o.diverged for o in group),
            sum(o.accuracy for o in group) / len(group),
            -sum(losses) / len(losses) if losses else float("-inf"),
        )

    return max(groups.values(), key=merit)[0].trial
