"""`time-to-loss`: steps to the loss, from seeds in one process, times step time under a link.

    seconds = steps to the target x seconds of a step

Steps are those of `loss-compressed`, step times those of the sweep `language` on an emulated
cluster. Full runs over that network check the product.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from testbed.base.config import RunConfig
from testbed.base.errors import UsageError
from testbed.base.spec import parse_options
from testbed.cluster.spec import parse_cluster
from testbed.records.cell import Cell
from testbed.records.text import rate_text
from testbed.statistics.runs import estimate
from testbed.studies.accuracy.kept import Kept
from testbed.studies.accuracy.language import Arm
from testbed.studies.accuracy.loss import FILE, Row, rows, steps_to
from testbed.studies.accuracy.loss import Options as LossOptions
from testbed.sweeping.study import Study, read_cells

BESIDE = "bf16"  # what every winner is compared with
MOST_FULL_RUNS = 6


@dataclass(frozen=True)
class Options:
    """Options of the study.

    Attributes:
        training: folder of `loss-compressed`.
        links: folder of the sweep `language`; empty: not run yet.
        full: folder of the sweep of `full-runs.toml`; empty: not run yet.
        steps: as of `loss-compressed`.
        seeds: as of `loss-compressed`.
    """

    training: str = "runs/compressors/language"
    links: str = "runs/compressors/language-links"
    full: str = "runs/compressors/language-full"
    steps: int = 300
    seeds: int = 5


@dataclass(frozen=True)
class Span:
    """Seconds and the ends of a 95 % interval, which a single run has not."""

    seconds: float
    ends: tuple[float, float] | None

    def text(self) -> str:
        """As text.

        Example:
            >>> Span(12.0, (11.0, 13.0)).text(), Span(12.0, None).text()
            ('12.0 [11.0, 13.0]', '12.0')
        """
        ends = "" if self.ends is None else f" [{self.ends[0]:.1f}, {self.ends[1]:.1f}]"
        return f"{self.seconds:.1f}{ends}"

    def apart(self, other: Span) -> bool:
        """Whether both have intervals, which do not meet."""
        if self.ends is None or other.ends is None:
            return False
        return self.ends[1] < other.ends[0] or other.ends[1] < self.ends[0]


def product(steps: Sequence[float], step_times_s: Sequence[float]) -> Span | None:
    """Geometric mean of the steps times that of the runs' median steps.

    The half widths of both on the logarithm, Student's at 95 %, are added in squares.

    Args:
        steps: to the target, of each seed.
        step_times_s: median step of each run.

    Example:
        >>> product([100.0, 100.0], [0.1, 0.1]).text()
        '10.0 [10.0, 10.0]'
        >>> product([100.0], []) is None
        True
    """
    found, times = estimate(steps), estimate(step_times_s)
    if found is None or times is None:
        return None
    seconds = found.time * times.time
    if found.high is None or times.high is None:
        return Span(seconds, None)
    half = math.hypot(math.log(found.high / found.time), math.log(times.high / times.time))
    return Span(seconds, (seconds * math.exp(-half), seconds * math.exp(half)))


Times = Mapping[tuple[str, float], Sequence[float]]  # (compressor, bit/s) -> median of each run


def step_times(cells: Sequence[Cell]) -> dict[tuple[str, float], list[float]]:
    """Of each compressor at each rate, the median step of each finished run, in seconds."""
    found: dict[tuple[str, float], list[float]] = {}
    for cell in cells:
        if cell.status == "ok" and cell.step_time_s:
            key = (cell.config.compressor, _rate_of(cell.config))
            found.setdefault(key, []).append(cell.step_time_s / cell.dilation)
    return found


def _rate_of(config: RunConfig) -> float:
    if config.cluster is None:
        raise UsageError(
            f"a cell of {config.workload} with {config.compressor} has no cluster; give the folder "
            "of the sweep `language`, whose cells have one"
        )
    return parse_cluster(config.cluster).rate_bps


def to_target(table: Sequence[Row], times: Times) -> dict[tuple[Arm, float], Span]:
    """Seconds of each arm that all seeds bring to the target, at each rate that was measured."""
    found = {}
    for row in table:
        steps = [each for each in row.to_target if each is not None]
        if len(steps) < len(row.to_target):
            continue
        for compressor, rate in times:
            if compressor == row.arm.compressor:
                span = product(steps, times[compressor, rate])
                if span is not None:
                    found[row.arm, rate] = span
    return found


def sentence(rate: float, spans: Mapping[Arm, Span]) -> str:
    """Which arm is first at the loss at a rate, and whether it beats bf16."""
    first = min(spans, key=lambda arm: spans[arm].seconds)
    best = spans[first]
    tied = [arm.name for arm in spans if arm != first and not best.apart(spans[arm])]
    words = f"{rate_text(rate)}: {first.name} is first at the loss, after {best.text()} s"
    beside = next((spans[arm] for arm in spans if arm.name == BESIDE), None)
    if first.name == BESIDE:
        words += "; no codec that sends less beats it"
    elif beside is None:
        words += f"; {BESIDE} has no figure"
    else:
        ratio = beside.seconds / best.seconds
        verdict = "beats" if best.apart(beside) else "is not significantly faster than"
        words += f"; it {verdict} {BESIDE}, which takes {ratio:.2f} times as long"
    return words + (f" (not told apart from it: {', '.join(tied)})." if tied else ".")


def to_markdown(
    options: Options, target: float | None, table: Sequence[Row], times: Times, full: Sequence[Cell]
) -> str:
    """The table of seconds, a sentence for each rate, the full runs, and what lacks."""
    lines = ["# Time to loss under a link", ""]
    if target is None:
        lines.append(f"No run of dense is in {options.training}: nothing can be told.")
        return "\n".join(lines) + "\n"
    rates = sorted({rate for _, rate in times})
    lines += [
        f"Target: {target:.4f} nats a byte on held-out files, the mean loss of dense after 80 % of "
        f"{options.steps} steps. Seconds: geometric mean of the steps that the seeds need, times "
        "that of the median steps of runs on an emulated cluster; in brackets 95 %. *never*: a "
        "seed does not reach the target in as many steps. Codecs are computed by this machine's "
        "processor, on two cores for all workers; arms of one codec share its step times.",
        "",
    ]
    if not rates:
        lines.append(f"No step times: {options.links} holds no finished cell of `language`.")
    spans = to_target(table, times)
    heads = " | ".join(f"{rate_text(rate)}: step ms | s to loss" for rate in rates)
    lines += [
        f"| arm | steps to target |{f' {heads} |' if rates else ''}",
        "|---|---|" + 2 * len(rates) * "---|",
    ]
    for row in table:
        reached = [steps for steps in row.to_target if steps is not None]
        whole = len(reached) == len(row.to_target)
        cells = [row.arm.name, f"{statistics.geometric_mean(reached):.0f}" if whole else "never"]
        for rate in rates:
            found = estimate(times.get((row.arm.compressor, rate), ()))
            span = spans.get((row.arm, rate))
            cells.append("" if found is None else f"{1e3 * found.time:.1f}")
            cells.append("" if found is None else "never" if span is None else span.text())
        lines.append(f"| {' | '.join(cells)} |")
    for rate in rates:
        here = {arm: span for (arm, other), span in spans.items() if other == rate}
        lines += ["", sentence(rate, here)] if here else []
    return "\n".join([*lines, "", *_full_table(options, target, table, times, full)]) + "\n"


def _full_table(
    options: Options, target: float, table: Sequence[Row], times: Times, full: Sequence[Cell]
) -> list[str]:
    lines = ["## Full runs over the network", ""]
    done = [cell for cell in full if cell.status == "ok" and cell.accuracy_curve]
    if not done:
        return [*lines, f"None: {options.full} holds no finished run of `full-runs.toml`."]
    lines += [
        "Predicted: this seed's steps times the step time above. Measured: training time until the "
        "loss was at the target, linear between judgings.",
        "",
        "| arm | rate | seed | steps predicted | steps | s predicted | s | error % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell in sorted(done, key=lambda c: (_rate_of(c.config), c.config.compressor)):
        config = cell.config
        alike = (r for r in table if r.arm.compressor == config.compressor)
        row = next((r for r in alike if config.momentum in (None, r.arm.momentum)), None)
        seeds = {} if row is None else {o.trial.seed: o for o in row.outcomes}
        own = seeds.get(cell.config.seed)
        step = estimate(times.get((cell.config.compressor, _rate_of(cell.config)), ()))
        if row is None or own is None or step is None:
            continue
        points = [(a, a.loss) for a in cell.accuracy_curve if a.loss is not None]
        steps = steps_to([(a.step, loss) for a, loss in points], target)
        measured = steps_to([(a.time_s, loss) for a, loss in points], target)
        foreseen = steps_to(own.curve, target)
        cells = [row.arm.name, rate_text(_rate_of(cell.config)), str(cell.config.seed)]
        cells += ["never" if s is None else f"{s:.0f}" for s in (foreseen, steps)]
        seconds = None if foreseen is None else foreseen * step.time
        cells += ["never" if s is None else f"{s:.1f}" for s in (seconds, measured)]
        error = ""
        if seconds is not None and measured is not None:
            error = f"{100 * (seconds / measured - 1):+.1f}"
        cells.append(error)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def full_runs(
    target: float | None, table: Sequence[Row], times: Times, like: Sequence[Cell]
) -> str:
    """A sweep in TOML: at each rate the first arm and bf16, or the next one, trained to the loss.

    Args:
        target: loss.
        table: of the seeds; the first seed's run is repeated over the network.
        times: of steps.
        like: cells of the sweep of the links, whose settings it takes.
    """
    spans = to_target(table, times)
    head = ['name = "language-full"', "repeats = 1"]
    if target is None or not spans or not like:
        return "\n".join([*head, "# nothing is known yet that could be checked"]) + "\n"
    config, first = like[0].config, table[0].outcomes[0].trial
    lines = [
        *head,
        "[base]",
        f'workload = "{first.workload}"',
        f'backend = "{config.backend}"',
        f'scheduler = "{config.scheduler}"',
        f"workers = {first.workers}",
        f"steps = {first.steps}",
        f"warmup_steps = {first.warmup_steps}",
        f"batch_size = {first.batch_size}",
        f"seed = {first.seed}",
        f"evaluate_every = {first.evaluate_every}",
        f"target_loss = [{target:.6g}]",
        "verify_steps = 0",
        "threads = 1",
        "deadline = 60.0",
    ]
    chosen: list[tuple[Row, float]] = []
    clusters = {_rate_of(cell.config): cell.config.cluster for cell in like}
    for rate in sorted(clusters):
        here = {arm: span for (arm, other), span in spans.items() if other == rate}
        order = sorted(here, key=lambda arm: here[arm].seconds)
        wanted = [*order[:1], *(arm for arm in order[1:] if arm.name == BESIDE), *order[1:2]][:2]
        chosen += [(row, rate) for arm in wanted for row in table if row.arm == arm]
    for row, rate in chosen[:MOST_FULL_RUNS]:
        lines += [
            "[[cells]]",
            f'cluster = "{clusters[rate]}"',
            f'compressor = "{row.arm.compressor}"',
            f"learning_rate = {row.rate:g}",
            f"momentum = {row.arm.momentum:g}",
        ]
    return "\n".join(lines) + "\n"


def _files(options: Options) -> Mapping[str, str]:
    comparison = LossOptions(steps=options.steps, seeds=options.seeds).comparison()
    done = Kept(Path(options.training), FILE).outcomes()
    target, table = rows(comparison, done, comparison.base.workers)
    links, full = (list(read_cells(Path(f)).values()) for f in (options.links, options.full))
    times = step_times(links)
    return {
        "time-to-loss.md": to_markdown(options, target, table, times, full),
        "full-runs.toml": full_runs(target, table, times, links),
    }


def _study(options: Options) -> Study:
    return Study(
        name="time-to-loss",
        summary="seconds to a loss under a link: steps of loss-compressed x step times of the "
        "sweep language, and full runs that check them (training, links, full, steps, seeds)",
        compute=lambda: _files(options),
        with_options=lambda given: _study(parse_options("time-to-loss", given, Options)),
    )


TIME_TO_LOSS = _study(Options())
