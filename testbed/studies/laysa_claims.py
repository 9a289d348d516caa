"""Which of the published claims of LaySA a table reaches, line by line. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from testbed.records.cell import Cell
from testbed.studies.laysa_table import (
    HALF,
    LEAST,
    LEAST_HOST,
    NAIVE,
    OFFLOADED,
    RECOMPUTED,
    SPARSE_ONLY,
    Foreseen,
    Group,
    groups_of,
    speeds_of,
)

LARGE: Final = ("resnet50", "densenet201", "inception-v4")
LARGE_BATCH: Final = 32
TIMED: Final = ("resnet50", 8)


def claims(models: Sequence[Foreseen], cells: Sequence[Cell]) -> str:
    """A list of all claims, each with its figures and whether they reach it.

    Args:
        models: forecasts.
        cells: measured.
    """
    groups = {model.workload: groups_of(model, cells) for model in models}
    lines = ["Which claims are reached:"]
    for model, found in groups.items():
        if model in LARGE:
            large = [g for g in found if g.batch_size >= LARGE_BATCH]
            lines += _peaks(
                model, large, 0.805, (LEAST, LEAST_HOST), f"{LARGE_BATCH} samples or more"
            )
    for model, found in groups.items():
        light = [g for g in found if not g.momentum]
        lines += _peaks(model, light, 0.6, (LEAST, LEAST_HOST), "the better batch")
        heavy = [g for g in found if g.momentum]
        lines += _peaks(model, heavy, 0.6, (LEAST_HOST,), "the better batch")
        lines += _peaks(model, heavy, 0.4, (LEAST,), "the better batch")
    for model, found in groups.items():
        lines += _times(model, found)
    fourfold = {model: _fold(found) for model, found in groups.items()}
    count = sum(fold >= 4 for fold in fourfold.values())
    told = ", ".join(f"{model} {fold:.3g}x" for model, fold in fourfold.items())
    lines.append(
        f"largest batch under sparse-only's peak, 4x on three of five: {_verdict(count >= 3)} "
        f"(predicted: {told})"
    )
    lines += [_speed(model, cells) for model in models]
    return "\n".join([lines[0], "", *(f"- {line}" for line in lines[1:])])


def _verdict(is_reached: bool) -> str:
    return "reached" if is_reached else "NOT reached"


def _peaks(
    model: str, groups: Sequence[Group], wanted: float, labels: Sequence[str], where: str
) -> list[str]:
    """One line for each momentum: the lowest peak of these rows."""
    lines = []
    for momentum in dict.fromkeys(group.momentum for group in groups):
        pairs = [
            (group[label], group[SPARSE_ONLY], group.batch_size)
            for group in groups
            for label in labels
            if group.momentum == momentum
        ]
        line, sparse, size = max(pairs, key=lambda pair: pair[0].below(pair[1]))
        share = line.below(sparse)
        how = "measured" if line.is_measured_beside(sparse) else "predicted"
        lines.append(
            f"{model}: peak {wanted:.1%} below sparse-only, momentum {momentum:g}, {where}: "
            f"{_verdict(share >= wanted)}: {share:.1%} ({how}; {line.row.label}; {size} samples)"
        )
    return lines


def _times(model: str, groups: Sequence[Group]) -> list[str]:
    lines = []
    for group in groups:
        half, sparse, naive = (group[label] for label in (HALF, SPARSE_ONLY, NAIVE))
        if half.step_s is None or sparse.step_s is None or naive.step_s is None:
            continue
        slower, saved = half.step_s / sparse.step_s, 1 - half.step_s / naive.step_s
        head = f"{model}, {group.batch_size} samples, momentum {group.momentum:g}: under half"
        is_asked = (model, group.batch_size) == TIMED
        first = _verdict(slower <= 1.10) + ": " if is_asked else ""
        second = _verdict(saved >= 0.1225) + ": " if is_asked else ""
        lines += [
            f"{head} the peak at most 1.10x of sparse-only: {first}{slower:.3f}x",
            f"{head} the peak 12.25% below recompute everywhere, same compressor: "
            f"{second}{saved:.1%}",
        ]
    return lines


def _fold(groups: Sequence[Group]) -> float:
    """The largest batch of any plan of LaySA over the smaller batch."""
    smaller = groups[0].batch_size
    rows = [group[label].row for group in groups for label in (LEAST, LEAST_HOST)]
    return max(row.largest_batch or 0 for row in rows) / smaller


def _speed(model: Foreseen, cells: Sequence[Cell]) -> str:
    speeds = speeds_of(model, cells, 0.0)
    ours = max((speeds[label] for label in (LEAST, LEAST_HOST) if label in speeds), default=0.0)
    reused = max((speeds[label] for label in (RECOMPUTED, OFFLOADED) if label in speeds), default=0)
    single = [speed for speed in (speeds.get(SPARSE_ONLY, 0.0), reused) if speed]
    if not ours or len(single) < 2:
        return f"{model.workload}: samples/s on the slow network: a row does not fit"
    weaker, better = ours / min(single), ours / max(single)
    return (
        f"{model.workload}: samples/s on the slow network 2.5x of the weaker single strategy: "
        f"{_verdict(weaker >= 2.5)}: {weaker:.2f}x of it, {better:.2f}x of the better one "
        f"(estimated, momentum 0). A larger batch gains only what of a step does not grow with it, "
        f"{model.fixed_share:.0%} of a dense one here, and what of the messages it hides"
    )
