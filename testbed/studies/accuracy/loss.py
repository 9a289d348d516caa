"""`loss-compressed`: held-out loss of a small language model under compressors, in equal steps.

What a compressor loses shows in the loss after as many steps, and in the steps to the target: the
loss that dense SGD has after 80 % of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec

from testbed.base.errors import UsageError
from testbed.base.files import to_json
from testbed.base.spec import parse_options
from testbed.studies.accuracy.carry_out import complete, cores
from testbed.studies.accuracy.kept import Kept
from testbed.studies.accuracy.language import Arm, Comparison, best_rate
from testbed.studies.accuracy.trials import Done, Mean, Outcome
from testbed.sweeping.study import Study

TARGET_SHARE = 0.8  # of the steps, after which dense has the target loss


def steps_to(curve: Sequence[tuple[float, float]], target: float) -> float | None:
    """Steps after which a curve first is at the target, linear between judgings; None: never.

    Example:
        >>> steps_to([(10, 3.0), (20, 2.0)], target=2.5), steps_to([(10, 3.0)], target=2.5)
        (15.0, None)
    """
    if curve and curve[0][1] <= target:
        return float(curve[0][0])
    for (step, loss), (after, lower) in pairwise(curve):
        if lower <= target:
            return step + (after - step) * (loss - target) / (loss - lower)
    return None


def target_of(dense: Sequence[Outcome], steps: int) -> float | None:
    """Mean loss of the dense runs after 80 % of their steps; None: there are none.

    Example:
        >>> target_of([], 300) is None
        True
    """
    place = round(TARGET_SHARE * steps)
    losses = [loss for outcome in dense for step, loss in outcome.curve if step == place]
    return statistics.fmean(losses) if losses else None


@dataclass(frozen=True)
class Row:
    """One arm with so many workers.

    Attributes:
        arm: of the comparison.
        rate: that it was trained with.
        loss: held-out, over seeds.
        difference: to dense, paired by seed.
        to_target: steps to the target, of each seed; None: never.
        outcomes: the runs.
    """

    arm: Arm
    rate: float
    loss: Mean
    difference: Mean
    to_target: tuple[float | None, ...]
    outcomes: tuple[Outcome, ...]


def rows(comparison: Comparison, done: Done, workers: int) -> tuple[float | None, list[Row]]:
    """The target, and a row for each arm of which a seed is done that is done of dense, too."""
    dense = comparison.finals(comparison.arms[0], done, workers)
    target = target_of(list(dense.values()), comparison.base.steps)
    found = []
    for arm in comparison.arms:
        own = comparison.finals(arm, done, workers)
        seeds = [seed for seed in own if seed in dense]
        if not seeds or target is None:
            continue
        outcomes = tuple(own[seed] for seed in seeds)
        losses = [outcome.judged_loss for outcome in outcomes]
        found.append(
            Row(
                arm,
                outcomes[0].trial.learning_rate,
                Mean.of(losses),
                Mean.of([own[seed].judged_loss - dense[seed].judged_loss for seed in seeds]),
                tuple(steps_to(outcome.curve, target) for outcome in outcomes),
                outcomes,
            )
        )
    return target, found


def to_markdown(comparison: Comparison, done: Done) -> str:
    """The tables, what lacks, and the whole search below them."""
    base = comparison.base
    lines = [
        f"# Loss under compression: {base.workload}, {base.steps} steps",
        "",
        f"Batch of {base.batch_size} per worker; all workers in one process, every parameter a "
        "message of its own through the reference driver. SGD with the momentum in the table "
        f"(`dgc` carries its own), constant rate after {base.warmup_steps} steps of warm-up. "
        f"The rate of each arm: the best of {comparison.search.budget} by one rule "
        f"(seed {comparison.search_seed}, "
        "judged by training samples that were held out). Loss: mean cross entropy in nats a byte "
        "on files that were never trained on. Intervals: 95 %, Student, over seeds, each by "
        "itself; differences paired by seed. Bytes: payload that one rank hands over per step.",
    ]
    for workers in (base.workers, comparison.many):
        lines += _table(comparison, done, workers) if workers else []
    lacking = [trial for trial in comparison.wanted(done) if trial not in done]
    if lacking:
        lines += ["", f"Not complete: {len(lacking)} runs lack of those that are known so far."]
    return "\n".join([*lines, "", *_search_table(comparison, done)]) + "\n"


def _table(comparison: Comparison, done: Done, workers: int) -> list[str]:
    target, found = rows(comparison, done, workers)
    if target is None:
        return ["", f"## {workers} workers", "", "No run of dense is done."]
    own = workers == comparison.base.workers
    rates = "" if own else f", at the rates found with {comparison.base.workers}"
    lines = [
        "",
        f"## {workers} workers{rates}",
        "",
        f"Target: {target:.4f}, the mean loss of dense after {TARGET_SHARE:.0%} of its steps.",
        "",
        "| arm | compressor | rate | momentum | seeds | loss | to dense | steps to target "
        "| bytes per step | state bytes | other than its authors' |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        first = row.outcomes[0]
        sent = statistics.fmean(o.sent_bytes for o in row.outcomes)
        cells = (
            row.arm.name,
            f"`{row.arm.compressor}`",
            f"{row.rate:g}",
            f"{row.arm.momentum:g}",
            str(len(row.outcomes)),
            row.loss.scaled(1, 4),
            "" if row.arm == comparison.arms[0] else row.difference.scaled(1, 4),
            target_words(row.to_target),
            f"{sent:.0f} ({100 * sent / first.dense_bytes:.2f} %)",
            str(first.state_bytes),
            row.arm.departs,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def target_words(to_target: Sequence[float | None]) -> str:
    """Mean steps to the target with its interval, or in how many runs it was reached.

    Example:
        >>> target_words([100.0, 110.0, 105.0]), target_words([None, 200.0]), target_words([None])
        ('105 ± 12', 'in 1 of 2 runs', 'never')
    """
    reached = [steps for steps in to_target if steps is not None]
    if not reached:
        return "never"
    if len(reached) < len(to_target):
        return f"in {len(reached)} of {len(to_target)} runs"
    return Mean.of(reached).scaled(1, 0)


def _search_table(comparison: Comparison, done: Done) -> list[str]:
    lines = [
        "## The search",
        "",
        "Loss on held-out training samples for each rate; the best in bold.",
        "",
        "| arm | rates: losses | best at the edge |",
        "|---|---|---|",
    ]
    for arm in comparison.arms:
        losses = comparison.losses(arm, done)
        if not losses:
            continue
        best = best_rate(losses)
        words = [f"{rate:g}: {_loss_words(losses[rate])}" for rate in sorted(losses)]
        words = [
            f"**{word}**" if rate == best else word
            for rate, word in zip(sorted(losses), words, strict=True)
        ]
        edge = "yes" if comparison.search.at_edge(losses) else "no"
        lines.append(f"| {arm.name} | {', '.join(words)} | {edge} |")
    return lines


def _loss_words(loss: float) -> str:
    return f"{loss:.4f}" if math.isfinite(loss) else "diverged"


FILE = "loss-compressed.json"


@dataclass(frozen=True)
class Options:
    """Options of the study.

    Attributes:
        steps: of each run, 50 to 1,000, a multiple of 50: it is judged at 80 % of them.
        seeds: of each arm.
        many: workers of the runs at the rates that were found with 4, more than 4; 0: none.
        processes: trials at a time; 0: two, or one on one core.
        run: 0: only the tables of what is in the folder.
    """

    steps: int = 300
    seeds: int = 5
    many: int = 16
    processes: int = 0
    run: bool = True

    def __post_init__(self) -> None:
        counts = self.seeds >= 1 and (self.many == 0 or self.many > 4) and self.processes >= 0
        if not 50 <= self.steps <= 1000 or self.steps % 50 or not counts:
            raise UsageError(
                f"loss-compressed: steps is {self.steps}, seeds {self.seeds}, many {self.many}, "
                f"processes {self.processes}; expected 50 to 1000 steps, a multiple of 50, a seed "
                "or more, many above 4 or 0, and processes of 0 or more"
            )

    def comparison(self) -> Comparison:
        """What these options ask for."""
        plain = Comparison()
        base = msgspec.structs.replace(plain.base, steps=self.steps)
        seeds = tuple(range(1, self.seeds + 1))
        return Comparison(seeds=seeds, many=self.many, base=base)


def _files(options: Options, folder: Path | None) -> Mapping[str, str]:
    comparison, name = options.comparison(), FILE.replace(".json", ".md")
    if options.run:
        record = complete(comparison, folder, FILE, options.processes or cores())
        done = {outcome.trial: outcome for outcome in record.outcomes}
        return {name: to_markdown(comparison, done), FILE: to_json(record).decode()}
    if folder is None:
        raise UsageError("loss-compressed: run=0 shows what is in a folder; give it with --output")
    return {name: to_markdown(comparison, Kept(folder, FILE).outcomes())}


def _study(options: Options) -> Study:
    return Study(
        name="loss-compressed",
        summary="byte-gpt under each compressor: rates searched, seeds, held-out loss, steps to "
        "the loss of dense (steps, seeds, many, processes, run)",
        compute=lambda: _files(options, None),
        go_on=lambda folder: _files(options, folder),
        with_options=lambda given: _study(parse_options("loss-compressed", given, Options)),
    )


LOSS_COMPRESSED = _study(Options())
