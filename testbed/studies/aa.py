"""The study `aa`: runs of one cell compared with themselves; whoever wins, wins by chance."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from testbed.base.config import RunConfig, make_config
from testbed.base.errors import UsageError
from testbed.base.files import to_json
from testbed.base.spec import parse_options
from testbed.records.cell import Cell
from testbed.statistics.runs import compare, estimate
from testbed.statistics.summary import autocorrelation, quantile
from testbed.sweeping.grid import Sweep
from testbed.sweeping.run import INTERRUPTED, carry_out, process_runner
from testbed.sweeping.study import Measured, Study, read_cells, study_store

NUM_SIMULATED: Final = 200  # banks of independent runs


@dataclass(frozen=True)
class Options:
    """Options of the study.

    Attributes:
        runs: in the bank.
        each: runs on each side of a split.
        splits: random splits of the bank.
        seed: of the splits and of the simulated banks.
        steps: of a run, its warm-up of five included.
        workload: of the cell.
        backend: of the cell.
        scheduler: of the cell.
        workers: of the cell.
        emulate: on an emulated cluster of as many nodes with 10 Gbit/s, at dilation 10.
    """

    runs: int = 40
    each: int = 5
    splits: int = 100
    seed: int = 1
    steps: int = 15
    workload: str = "replay:resnet50-v100"
    backend: str = "mpi-ring"
    scheduler: str = "wfbp"
    workers: int = 4
    emulate: bool = True

    def __post_init__(self) -> None:
        if self.each < 2 or self.runs < 2 * self.each or self.splits < 1:
            raise UsageError(
                f"aa: runs is {self.runs}, each {self.each} and splits {self.splits}; expected at "
                "least two on each side, twice as many in the bank, and one split"
            )

    def cell(self) -> RunConfig:
        """The cell that is run."""
        cluster = f"nodes={self.workers},rate=10gbit,dilation=10" if self.emulate else None
        return make_config(
            {
                "workload": self.workload,
                "backend": self.backend,
                "scheduler": self.scheduler,
                "workers": self.workers,
                "cluster": cluster,
                "steps": self.steps,
                "warmup": 5,
                "verify_steps": 0,
                "threads": 1,
                "deadline": 60.0,
            }
        )


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a bank tells, its runs' medians taken one way.

    Attributes:
        steps: whose median a run enters with: `counted`, or `all`, those that were disturbed, too.
        spread: standard deviation of the logarithms of the runs' medians.
        smallest_s: median of the fastest run, in seconds of this machine.
        largest_s: median of the slowest run.
        between_runs: autocorrelation of the runs in the order in which they ran; null: unknown.
        false_winners: splits in which one side is significantly faster.
        unstable: splits in which a side spreads too much to be ranked.
        resolves: median over the splits of the smallest difference that is significant; null:
            none was ranked.
    """

    steps: Literal["counted", "all"]
    spread: float
    smallest_s: float
    largest_s: float
    between_runs: float | None
    false_winners: int
    unstable: int
    resolves: float | None


class Bank(msgspec.Struct, frozen=True, kw_only=True):
    """`testbed.aa/1`: a bank of runs of one cell, and its splits.

    Attributes:
        config: of the cell.
        num_runs: finished runs; the splits are of these.
        failed_runs: left out.
        each: runs on each side of a split.
        splits: number of them.
        within_runs: autocorrelation of the steps of each run.
        outcomes: with and without the filter of disturbed steps.
        expected: false winners in as many splits of banks of independent runs: median and 95th
            percentile over simulated banks.
    """

    schema: Literal["testbed.aa/1"] = "testbed.aa/1"
    config: RunConfig
    num_runs: int
    failed_runs: int
    each: int
    splits: int
    within_runs: tuple[float, ...]
    outcomes: tuple[Outcome, ...]
    expected: tuple[float, float]


def split_bank(
    medians: Sequence[float], each: int, splits: int, seed: int
) -> tuple[int, int, list[float]]:
    """How often runs of one cell seem to be two cells.

    Splits of one bank share runs, so that their verdicts depend on each other: the number of false
    winners varies more from bank to bank than that of as many independent pairs would.

    Args:
        medians: of the bank's runs, at least 2 `each`.
        each: runs on each side, drawn without replacement.
        splits: how often.
        seed: of the draws.

    Returns:
        False winners, splits with an unstable side, and what each other split resolves.

    Example:
        >>> split_bank([1.0, 1.01, 0.99, 1.0, 1.01, 0.99], each=3, splits=10, seed=1)[:2]
        (2, 0)
    """
    draw = random.Random(seed)
    winners, unstable, resolves = 0, 0, []
    for _ in range(splits):
        drawn = draw.sample(list(medians), 2 * each)
        found = compare({"a": drawn[:each], "b": drawn[each:]})
        if found.resolves is None:
            unstable += 1
            continue
        winners += not found.tied["a"]
        resolves.append(found.resolves)
    return winners, unstable, resolves


def expected_winners(options: Options) -> tuple[float, float]:
    """False winners of banks of independent runs: median and 95th percentile of simulated ones.

    They do not depend on the runs' spread, as long as it is small enough to be ranked.
    """
    draw = random.Random(options.seed)
    counts = []
    for number in range(NUM_SIMULATED):
        bank = [draw.lognormvariate(0.0, 0.001) for _ in range(options.runs)]
        counts.append(split_bank(bank, options.each, options.splits, number)[0])
    return quantile(counts, 0.5), quantile(counts, 0.95)


def judge_bank(options: Options, cells: Sequence[Cell]) -> Bank:
    """The bank's table.

    Args:
        options: how it is split.
        cells: in the order in which they ran.

    Raises:
        UsageError: too few of them finished.
    """
    done = [cell for cell in cells if cell.status == "ok"]
    if len(done) < 2 * options.each:
        raise UsageError(
            f"aa: {len(done)} runs of {len(cells)} finished; expected {2 * options.each} or more: "
            "look at the errors in their records, then go on in the same folder"
        )
    within = (autocorrelation(cell.samples.step_time_s) for cell in done)
    ways: dict[Literal["counted", "all"], Callable[[Cell], float | None]] = {
        "counted": lambda cell: cell.step_time_s,
        "all": lambda cell: cell.step_time_unfiltered_s,
    }
    outcomes = []
    for steps, median_of in ways.items():
        medians = [median for cell in done if (median := median_of(cell))]
        if len(medians) == len(done):
            outcomes.append(_outcome(steps, medians, options))
    return Bank(
        config=msgspec.structs.replace(done[0].config, repeat=0),
        num_runs=len(done),
        failed_runs=len(cells) - len(done),
        each=options.each,
        splits=options.splits,
        within_runs=tuple(r for r in within if r is not None),
        outcomes=tuple(outcomes),
        expected=expected_winners(options),
    )


def _outcome(
    steps: Literal["counted", "all"], medians: Sequence[float], options: Options
) -> Outcome:
    found = estimate(medians)
    assert found is not None
    winners, unstable, resolves = split_bank(medians, options.each, options.splits, options.seed)
    return Outcome(
        steps=steps,
        spread=found.spread or 0.0,
        smallest_s=found.smallest,
        largest_s=found.largest,
        between_runs=autocorrelation(medians),
        false_winners=winners,
        unstable=unstable,
        resolves=statistics.median(resolves) if resolves else None,
    )


def to_markdown(bank: Bank) -> str:
    """The bank for reading."""
    head = (
        "| steps | spread between runs % | fastest s | slowest s | autocorrelation of runs "
        "| false winners | unstable | resolves % |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    )
    config, failed = bank.config, f", {bank.failed_runs} failed" if bank.failed_runs else ""
    where = f" on {config.cluster}" if config.cluster else ""
    parts = [
        "# One cell against itself",
        f"{bank.num_runs} runs{failed} of {config.workload}, {config.backend}, {config.scheduler}, "
        f"{config.workers} workers{where}, {config.steps} steps each with a warm-up of "
        f"{config.warmup}; {bank.splits} random splits into {bank.each} + {bank.each} runs. "
        "Made by `testbed sweep aa`.",
        "\n".join([*head, *map(_row, bank.outcomes)]),
        f"{_expected_words(bank.expected, bank.splits)} Times are this machine's. *counted*: steps "
        "that the filter of disturbed steps leaves; *all*: those, too, that it takes.",
    ]
    if bank.within_runs:
        low, middle, high = (quantile(bank.within_runs, q) for q in (0.0, 0.5, 1.0))
        parts.append(
            f"Autocorrelation of neighbouring steps within a run: median {middle:.2f}, "
            f"{low:.2f} to {high:.2f}."
        )
    return "\n\n".join(parts) + "\n"


def _row(outcome: Outcome) -> str:
    between = "" if outcome.between_runs is None else f"{outcome.between_runs:.2f}"
    resolves = "" if outcome.resolves is None else f"{100 * outcome.resolves:.2f}"
    return (
        f"| {outcome.steps} | {100 * outcome.spread:.2f} | {outcome.smallest_s:.4g} "
        f"| {outcome.largest_s:.4g} | {between} | {outcome.false_winners} | {outcome.unstable} "
        f"| {resolves} |"
    )


def _expected_words(expected: tuple[float, float], splits: int) -> str:
    median, most = expected
    return (
        f"Of banks of independent runs half have at most {median:g} false winners in {splits} "
        f"splits, 95 of 100 at most {most:g} ({NUM_SIMULATED} simulated banks)."
    )


def _expect(options: Options) -> Mapping[str, str]:
    return {"aa-expected.md": _expected_words(expected_winners(options), options.splits) + "\n"}


def _measure(folder: Path, options: Options) -> Measured:
    sweep = Sweep("aa", (options.cell(),), repeats=options.runs)
    store = study_store(folder / "bank", sweep)
    with process_runner(store, 600.0) as runner:
        status = carry_out(store, runner)
    if status == INTERRUPTED:
        return Measured({}, status)
    found = read_cells(store.path)
    cells = [found[key] for key, _, _ in store.read_plan().order if key in found]
    bank = judge_bank(options, cells)
    return Measured({"aa.md": to_markdown(bank), "aa.json": to_json(bank).decode()}, status)


def _study(options: Options) -> Study:
    return Study(
        name="aa",
        summary="a bank of runs of one cell, split at random into two sides: false winners, spread "
        "(runs, each, splits, seed, steps, workload, backend, scheduler, workers, emulate)",
        compute=lambda: _expect(options),
        measure=lambda folder, files: _measure(folder, options),
        with_options=lambda given: _study(parse_options("aa", given, Options)),
    )


AA = _study(Options())
