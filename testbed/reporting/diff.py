"""Whether the cells of one side differ from those of another by more than their runs do.

The unit is the run, as in `testbed.statistics.runs`: of a time the median over its steps. Where
both sides ran in the same rounds, runs are paired by their round; else Welch's interval is taken,
with errors that are drawn towards those of the other cells. Of each metric all cells are tested at
once, by Holm's procedure.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from testbed.base.config import RunConfig
from testbed.base.errors import UnknownName
from testbed.records.cell import Cell
from testbed.records.diff import CellDiff, Diff, MetricDiff
from testbed.reporting.aggregate import median_s
from testbed.reporting.sides import (
    Runs,
    Side,
    common_rounds,
    differing,
    environment_differences,
    match,
)
from testbed.reporting.work import undilated
from testbed.statistics.differences import Difference, difference_of, holm_level, moderated
from testbed.statistics.runs import STABLE
from testbed.sweeping.progress import label


@dataclass(frozen=True)
class Metric:
    """A number of a run that two sides are compared by.

    Attributes:
        unit: `s`, `B`, or empty.
        more: what B is where it has more.
        less: what it is where it has less.
        ratio: it is always above 0 and compared by its logarithm; else by its difference.
        counted: a count, not a measurement: it differs or it does not, runs need no repeats.
        seeded: it hangs on the seed: runs of one seed tell nothing of others, however alike.
    """

    unit: str
    more: str
    less: str
    ratio: bool = True
    counted: bool = False
    seeded: bool = False


METRICS: Final[Mapping[str, Metric]] = {
    "step_time_s": Metric("s", "slower", "faster"),
    "step_time_p95_s": Metric("s", "slower", "faster"),
    "compute_s": Metric("s", "slower", "faster"),
    "exposed_comm_s": Metric("s", "slower", "faster", ratio=False),
    "samples_per_s": Metric("", "faster", "slower"),
    "training_time_s": Metric("s", "slower", "faster"),
    "peak_memory_bytes": Metric("B", "more", "less"),
    "wire_bytes_per_step": Metric("B", "more", "less", counted=True),
    "received_bytes_per_step": Metric("B", "more", "less", counted=True),
    "num_messages": Metric("", "more", "fewer", counted=True),
    "final_loss": Metric("", "higher", "lower", ratio=False, seeded=True),
    "test_accuracy": Metric("", "higher", "lower", ratio=False, seeded=True),
}
_OF_STEPS = ("step_time_s", "compute_s", "exposed_comm_s")
_INPUTS = {
    "initial parameters": "initial_digest",
    "samples": "sample_digest",
    "sample contents": "content_digest",
}


def metric_of(name: str) -> Metric:
    """A metric by its name.

    Raises:
        UnknownName: there is none of that name; the message has the closest.
    """
    if name not in METRICS:
        raise UnknownName("metric", name, METRICS)
    return METRICS[name]


def value_of(cell: Cell, name: str) -> float | None:
    """A run's value of a metric, in the time of the cluster that it emulated; None: not recorded.

    Example:
        >>> made = Cell(backend="gloo", workload="w", num_workers=2, config=RunConfig(),
        ...             step_time_s=0.5, dilation=10.0)
        >>> value_of(made, "step_time_s"), value_of(made, "final_loss")
        (0.05, None)
    """
    if name in _OF_STEPS:
        median = median_s(cell, name)
        return None if median is None else median / cell.dilation
    found = getattr(undilated(cell), name)
    return None if found is None else float(found)


def diff(a: Side, b: Side) -> Diff:
    """What B is beside A, cell by cell."""
    pairs, only_a, only_b = match(a, b)
    works = [_same_work(one, other) for one, other in pairs]
    compared = [_compare(one, other) for one, other in pairs]
    same = [number for number, (verdict, _) in enumerate(works) if verdict is not False]
    for number, drawn in zip(same, _moderated([compared[n] for n in same]), strict=True):
        if not any(_is_unstable(side) for side in pairs[number]):
            compared[number] = drawn
    levels = _levels([compared[number] for number in same])
    labels = _labels([one.settings for one, _ in pairs])
    cells = [
        _cell_diff(name, pair, found, work, levels)
        for name, pair, found, work in zip(labels, pairs, compared, works, strict=True)
    ]
    runs_a = [cell for one, _ in pairs for cell in one.ok.values()]
    runs_b = [cell for _, other in pairs for cell in other.ok.values()]
    return Diff(
        a=a.name,
        b=b.name,
        common=_common([one.settings for one, _ in pairs]),
        cells=tuple(cells),
        only_a=tuple(_alone(one, only_b) for one in only_a),
        only_b=tuple(_alone(one, only_a) for one in only_b),
        runs_only_a=tuple(len(one.ok) for one in only_a),
        environment=environment_differences(runs_a, runs_b),
        notes=(*(f"A: {note}" for note in a.notes), *(f"B: {note}" for note in b.notes)),
    )


@dataclass(frozen=True)
class _Compared:
    a: float
    b: float
    found: Difference
    ratio: bool
    untold: str = "one run"  # the verdict where nothing tells the error


def _compare(one: Runs, other: Runs) -> dict[str, _Compared]:
    """What the runs of both sides tell of each metric that they have recorded."""
    rounds, found = common_rounds(one, other), {}
    one_seed = any(len({c.config.seed for c in s.ok.values()}) < len(s.ok) for s in (one, other))
    for name, metric in METRICS.items():
        sides = [
            {n: v for n, cell in side.ok.items() if (v := value_of(cell, name)) is not None}
            for side in (one, other)
        ]
        if not all(sides):
            continue
        keys = [n for n in rounds if all(n in side for side in sides)]
        paired = len(keys) > 1
        x, y = ([side[n] for n in (keys if paired else side)] for side in sides)
        if metric.ratio and min(*x, *y) <= 0:
            if not metric.counted:
                continue  # there was nothing to measure
            metric = dataclasses.replace(metric, ratio=False)
        found[name] = _compared(x, y, metric, paired)
        if metric.seeded and one_seed:
            apart = dataclasses.replace(found[name].found, error=None)
            found[name] = dataclasses.replace(found[name], found=apart, untold="one seed")
    return found


def _compared(a: Sequence[float], b: Sequence[float], metric: Metric, paired: bool) -> _Compared:
    logs = [[math.log(v) for v in side] if metric.ratio else list(side) for side in (a, b)]
    mean_a, mean_b = (statistics.fmean(side) for side in logs)
    if metric.ratio:
        mean_a, mean_b = math.exp(mean_a), math.exp(mean_b)
    if metric.counted and len({*a}) == len({*b}) == 1:
        apart = logs[1][0] - logs[0][0] if a[0] != b[0] else 0.0
        return _Compared(a[0], b[0], Difference(apart, 0.0, 1, 0), metric.ratio)
    found = difference_of(logs[1], logs[0], paired=paired)
    return _Compared(mean_a, mean_b, found, metric.ratio)


def _moderated(compared: Sequence[Mapping[str, _Compared]]) -> list[dict[str, _Compared]]:
    """The same, of measured metrics with errors that know of the other cells' runs."""
    drawn = [dict(each) for each in compared]
    for name in (name for name, metric in METRICS.items() if not metric.counted):
        family = [each for each in drawn if name in each]
        found = moderated([each[name].found for each in family])
        for each, apart in zip(family, found, strict=True):
            each[name] = dataclasses.replace(each[name], found=apart)
    return drawn


def _levels(compared: Sequence[Mapping[str, _Compared]]) -> dict[str, float]:
    """Of each metric the p-value up to which the cells differ that did the same work."""
    return {
        name: holm_level(
            [p for c in compared if name in c and (p := c[name].found.p_value) is not None]
        )
        for name in METRICS
    }


def _metric_diff(name: str, one: _Compared, level: float) -> MetricDiff:
    found, p_value = one.found, one.found.p_value
    ends = found.interval(1 - level)
    verdict = one.untold
    if p_value is not None:
        metric = METRICS[name]
        word = metric.more if found.mean > 0 else metric.less
        verdict = word if found.mean and p_value <= level else "tied"

    def apart(value: float) -> float:
        return one.a * math.expm1(value) if one.ratio else value

    def share(value: float) -> float | None:
        return apart(value) / abs(one.a) if one.a else None

    half = None if ends is None else (ends[1] - ends[0]) / 2
    low, high = (None, None) if ends is None else map(share, ends)
    return MetricDiff(
        metric=name,
        a=one.a,
        b=one.b,
        difference=apart(found.mean),
        share=share(found.mean),
        low=low,
        high=high,
        resolves=None if half is None else apart(half),
        resolves_share=None if half is None else share(half),
        p_value=p_value,
        num_pairs=found.num_pairs,
        verdict=verdict,
    )


def _cell_diff(
    name: str,
    pair: tuple[Runs, Runs],
    compared: Mapping[str, _Compared],
    work: tuple[bool | None, str],
    levels: Mapping[str, float],
) -> CellDiff:
    (one, other), (same, words) = pair, work
    metrics = [_metric_diff(metric, found, levels[metric]) for metric, found in compared.items()]
    if same is False:
        metrics = [msgspec.structs.replace(each, verdict="other work") for each in metrics]
    failed = [*one.failed, *other.failed]
    return CellDiff(
        label=name,
        settings=differing(one.settings, other.settings) if one.ok and other.ok else {},
        runs_a=len(one.ok),
        runs_b=len(other.ok),
        failed_a=len(one.failed),
        failed_b=len(other.failed),
        error=failed[-1].error if failed else "",
        same_work=same,
        work=words,
        unstable=tuple(n for n, side in (("A", one), ("B", other)) if _is_unstable(side)),
        metrics=tuple(metrics),
    )


def _is_unstable(side: Runs) -> bool:
    times = [v for cell in side.ok.values() if (v := value_of(cell, "step_time_s"))]
    return len(times) > 1 and statistics.stdev(map(math.log, times)) >= STABLE


def _same_work(one: Runs, other: Runs) -> tuple[bool | None, str]:
    """Whether both sides trained the same from the same, and in words what agrees."""
    if not (one.ok and other.ok):
        return None, ""
    a, b = list(one.ok.values()), list(other.ok.values())
    known = False
    for what, field in _INPUTS.items():
        sides = [{d for cell in side if (d := getattr(cell, field))} for side in (a, b)]
        if all(sides) and sides[0] != sides[1]:
            first, second = (" and ".join(sorted(d[:8] for d in side)) for side in sides)
            return False, f"{what} differ: {first} in A, {second} in B"
        known |= all(sides) and field != "content_digest"
    verdicts = [{cell.identical_work for cell in side} for side in (a, b)]
    for side, (mine, others), runs in (("A", verdicts, a), ("B", verdicts[::-1], b)):
        if False in mine and False not in others:
            note = next(c.identical_work_note for c in runs if c.identical_work is False)
            return False, f"{side} did not do the work that it was to do: {note}"
    ends = [{cell.final_digest for cell in side} for side in (a, b)]
    end = "same parameters at the end" if ends[0] == ends[1] else "other parameters at the end"
    if not known:
        return None, "no digests of the work are recorded"
    return True, end


# Cells in words: what they have in common is said once.


def _labels(settings: Sequence[RunConfig]) -> list[str]:
    """Each cell by what it does not share with all others; one alone as a sweep tells it."""
    if len(settings) == 1:
        return [label(settings[0]).rpartition(", ")[0]]
    names = [n for n in RunConfig.__struct_fields__ if len({getattr(s, n) for s in settings}) > 1]
    return [", ".join(_in_words(n, getattr(each, n)) for n in names) for each in settings]


def _common(settings: Sequence[RunConfig]) -> str:
    """The settings of all cells that are not the default, where there are several cells."""
    if len(settings) < 2:
        return ""
    default = RunConfig()
    shared = []
    for name in RunConfig.__struct_fields__:
        values = {getattr(each, name) for each in settings}
        named = name in ("workload", "backend", "workers")
        if len(values) == 1 and (named or values != {getattr(default, name)}):
            shared.append(_in_words(name, *values))
    return ", ".join(shared)


def _in_words(name: str, value: object) -> str:
    """A setting for a label: parts and texts speak for themselves."""
    if name == "workers":
        return f"{value} workers"
    if isinstance(value, str) and getattr(RunConfig(), name) is not None:
        return value
    return f"{name.replace('_', ' ')} {value}"


def _alone(one: Runs, others: Sequence[Runs]) -> str:
    """A cell without a counterpart, and what the nearest of the other side differs in."""
    name = label(one.settings).rpartition(", ")[0]
    if not others:
        return name
    near = min((differing(one.settings, other.settings) for other in others), key=len)
    if len(near) > 3:
        return name
    words = ", ".join(f"{n.replace('_', ' ')} {a}, not {b}" for n, (a, b) in near.items())
    return f"{name} ({words})"
