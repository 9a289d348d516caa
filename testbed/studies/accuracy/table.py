"""The table of a comparison: mean final accuracy, its interval, and the difference to dense."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

from testbed.studies.accuracy.plan import Comparison, Outcome, Trial


@dataclass(frozen=True)
class Mean:
    """A mean and half the width of its 95 % interval, which is infinite for one sample.

        mean +- t(0.975, n - 1) s / sqrt(n)

    Reference:
        Student, 1908, Biometrika.

    Example:
        >>> found = Mean.of([1.0, 2.0, 3.0])
        >>> round(found.mean, 3), round(found.half_width, 3)
        (2.0, 2.484)
    """

    mean: float
    half_width: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Mean:
        """Of one sample and more."""
        count = len(samples)
        if count < 2:
            return cls(samples[0], math.inf)
        error = statistics.stdev(samples) / math.sqrt(count)
        return cls(statistics.fmean(samples), float(stats.t.ppf(0.975, count - 1)) * error)

    def scaled(self, factor: float, digits: int = 2) -> str:
        """As text."""
        return f"{self.mean * factor:.{digits}f} ± {self.half_width * factor:.{digits}f}"


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
