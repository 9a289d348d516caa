"""`accuracy-compressed`: final accuracy on digits under compressors, beside that of dense SGD.

First the search, then the best rate of each method on all seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from testbed.base.files import to_json
from testbed.studies.accuracy.carry_out import complete, cores
from testbed.studies.accuracy.trials import Done, Mean, Outcome, Trial
from testbed.sweeping.study import Study

# What is compared: methods, the rates that are searched, and how much each may lose.

RATES = (0.05, 0.1, 0.2, 0.4, 0.8)
DENSE = "dense"
TOPK = "topk 1 %, ef"
SIGN = "ef-sign"


@dataclass(frozen=True)
class Method:
    """One row of the table.

    Attributes:
        name: of the row.
        compressor: its specification.
        steps_to: rates that are searched: how far a steady gradient of 1 moves a parameter in a
            step, so the optimizer's rate is this times (1 - all momentum).
        momenta: of the optimizer; each is searched.
        own_momentum: what the compressor itself carries.
        may_lose: points of accuracy that it may end below dense; None: no bound, it is shown to
            tell what error feedback does.
        settings_of: the method whose best setting it takes, instead of a search of its own: what
            a switch does, all else equal.
    """

    name: str
    compressor: str
    steps_to: tuple[float, ...] = RATES
    momenta: tuple[float, ...] = (0.0, 0.9)
    own_momentum: float = 0.0
    may_lose: float | None = None
    settings_of: str | None = None

    def settings(self) -> list[tuple[float, float]]:
        """(learning rate, momentum) of each searched setting.

        Example:
            >>> Method("sgd", "none", (0.1, 0.2), (0.0, 0.9)).settings()
            [(0.1, 0.0), (0.2, 0.0), (0.01, 0.9), (0.02, 0.9)]
        """
        return [
            (float(f"{step * (1 - momentum) * (1 - self.own_momentum):.6g}"), momentum)
            for momentum in self.momenta
            for step in self.steps_to
        ]


def methods(steps_per_epoch: int = 11) -> tuple[Method, ...]:
    """The comparison, dense first.

    Args:
        steps_per_epoch: of the trials; each warm-up stage of DGC is an epoch, as published.
    """
    dgc = f"dgc:ratio=0.01,momentum=0.9,warmup_steps={steps_per_epoch}"
    return (
        Method(DENSE, "none", may_lose=0.0),
        Method("fp16", "fp16", may_lose=1.0),
        Method("bf16", "bf16", may_lose=1.0),
        Method(TOPK, "ef+topk:ratio=0.01", may_lose=1.0),
        Method("dgc 1 %", dgc, momenta=(0.0,), own_momentum=0.9, may_lose=1.0),
        Method("powersgd rank 4", "powersgd:rank=4", may_lose=1.0),
        Method("qsgd 4 bit", "qsgd:bits=4,norm=max", may_lose=1.0),
        Method(SIGN, "ef-sign", may_lose=2.0),
        Method("topk 1 %, ef off", "topk:ratio=0.01", settings_of=TOPK),
        Method("ef-sign, ef off", "sign:vote=0,scaled=1", settings_of=SIGN),
        Method("topk 1 %, no ef, own rate", "topk:ratio=0.01"),
        Method("sign, no ef, own rate", "sign:vote=0,scaled=1"),
    )


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

    def wanted(self, done: Done) -> list[Trial]:
        """The search, then the final trials of each method whose search is complete."""
        return self.search() + self.final(done)

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


# The table of a comparison: mean final accuracy, its interval, and the difference to dense.


@dataclass(frozen=True)
class Row:
    """One method's final runs.

    Attributes:
        method: its name.
        setting: one of its final trials.
        accuracy: over seeds.
        difference: accuracy less that of dense with the same seed.
        outcomes: the final runs.
        may_lose: points below dense that are allowed; None: none were set.
    """

    method: str
    setting: Trial
    accuracy: Mean
    difference: Mean
    outcomes: tuple[Outcome, ...]
    may_lose: float | None

    @property
    def verdict(self) -> str:
        """Whether the mean difference stays within what may be lost."""
        if self.may_lose is None:
            return "no bound"
        points = -100 * self.difference.mean
        return f"within {self.may_lose:g}" if points <= self.may_lose else f"over {self.may_lose:g}"


def rows(comparison: Comparison, outcomes: Sequence[Outcome]) -> list[Row]:
    """A row for each method whose final runs and dense's are all there, dense first."""
    done = {outcome.trial: outcome for outcome in outcomes}
    final: dict[str, list[Trial]] = {}
    for trial in comparison.final(done):
        final.setdefault(trial.method, []).append(trial)
    dense = [done.get(t) for t in final.get(comparison.methods[0].name, ())]
    found = []
    for method in comparison.methods:
        runs = [done.get(trial) for trial in final.get(method.name, ())]
        both = [(a, b) for a, b in zip(runs, dense, strict=False) if a and b]
        if not both or len(both) < len(comparison.seeds):
            continue
        found.append(
            Row(
                method.name,
                both[0][0].trial,
                Mean.of([own.accuracy for own, _ in both]),
                Mean.of([own.accuracy - other.accuracy for own, other in both]),
                tuple(own for own, _ in both),
                method.may_lose,
            )
        )
    return found


def to_markdown(comparison: Comparison, outcomes: Sequence[Outcome]) -> str:
    """The table, and the whole search below it."""
    base = comparison.base
    lines = [
        f"# Accuracy under compression: {base.workload}, {base.epochs} epochs",
        "",
        f"{base.workers} workers of batch {base.batch_size} in one process, compressed exchange of "
        "every parameter by the reference driver; optimizer SGD at a constant rate.",
        f"Rate and momentum of each method: the best of its search (seeds "
        f"{', '.join(map(str, comparison.search_seeds))}; trained on four fifths of the training "
        f"samples, judged by the rest). Then {len(comparison.seeds)} seeds on all training "
        "samples, judged by the test samples. Intervals: 95 %, Student; differences paired by "
        "seed.",
        "",
        "| method | compressor | rate | momentum | accuracy % | to dense, points | allowed | "
        "bytes sent | state bytes | cpu s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows(comparison, outcomes):
        first = row.outcomes[0]
        sent = statistics.fmean(o.sent_bytes for o in row.outcomes)
        difference = "" if row.method == comparison.methods[0].name else row.difference.scaled(100)
        cells = (
            row.method,
            f"`{row.setting.compressor}`",
            f"{row.setting.learning_rate:g}",
            f"{row.setting.momentum:g}",
            row.accuracy.scaled(100),
            difference,
            row.verdict if difference else "",
            f"{sent:.0f} of {first.dense_bytes} ({100 * sent / first.dense_bytes:.2f} %)",
            str(first.state_bytes),
            f"{statistics.fmean(o.cpu_s for o in row.outcomes):.1f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_search_table(comparison, outcomes)]) + "\n"


def _search_table(comparison: Comparison, outcomes: Sequence[Outcome]) -> list[str]:
    done = {outcome.trial: outcome for outcome in outcomes}
    lines = [
        "## The search",
        "",
        "| method | momentum | rate | accuracy on held-out samples % | training loss |",
        "|---|---|---|---|---|",
    ]
    for trial in comparison.search():
        outcome = done.get(trial)
        if outcome is None:
            continue
        loss = "-" if outcome.loss is None else f"{outcome.loss:.4g}"
        ended = f" (diverged at step {outcome.steps})" if outcome.diverged else ""
        lines.append(
            f"| {trial.method} | {trial.momentum:g} | {trial.learning_rate:g} | "
            f"{100 * outcome.accuracy:.2f}{ended} | {loss} |"
        )
    return lines


FILE = "accuracy-compressed.json"


def _files(folder: Path | None = None) -> Mapping[str, str]:
    comparison = Comparison(methods())
    record = complete(comparison, folder, FILE, cores())
    return {
        FILE.replace(".json", ".md"): to_markdown(comparison, record.outcomes),
        FILE: to_json(record).decode(),
    }


ACCURACY_COMPRESSED = Study(
    name="accuracy-compressed",
    summary="digits-cnn under each compressor: rates searched, 30 epochs, 6 seeds, beside dense",
    compute=_files,
    go_on=_files,
)
