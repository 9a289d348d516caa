"""Which of the published claims of LaySA a table reaches, line by line. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    lines = ["Which claims are reached (measured where rows were run, else predicted):"]
    for model, found in groups.items():
        if model in LARGE:
            large = [g for g in found if g.batch_size >= LARGE_BATCH]
            lines.append(_peak(model, large, 0.805, any_where, f"at {LARGE_BATCH} samples or more"))
    for model, found in groups.items():
        light = "at the better batch, momentum absent or on the host"
        lines.append(_peak(model, found, 0.6, without_momentum, light))
        heavy = [g for g in found if g.momentum]
        lines.append(_peak(model, heavy, 0.4, on_device, "momentum on the device"))
    for model, found in groups.items():
        lines += _times(model, found)
    fourfold = {model: _fold(found) for model, found in groups.items()}
    count = sum(fold >= 4 for fold in fourfold.values())
    told = ", ".join(f"{model} {fold:.3g}x" for model, fold in fourfold.items())
    lines.append(
        f"largest batch under sparse-only's peak, 4x on three of five: {_verdict(count >= 3)} "
        f"({told})"
    )
    lines += [_speed(model, cells) for model in models]
    return "\n".join([lines[0], "", *(f"- {line}" for line in lines[1:])])


Lowest = Callable[[Group], float]


def any_where(group: Group) -> float:
    """By how much the better of both least peaks is lower, with the mirror anywhere."""
    return max(group[label].below(group[SPARSE_ONLY]) for label in (LEAST, LEAST_HOST))


def without_momentum(group: Group) -> float:
    """The same with momentum absent or on the host."""
    return group[LEAST_HOST].below(group[SPARSE_ONLY]) if group.momentum else any_where(group)


def on_device(group: Group) -> float:
    """The same with everything on the device."""
    return group[LEAST].below(group[SPARSE_ONLY])


def _verdict(is_reached: bool) -> str:
    return "reached" if is_reached else "NOT reached"


def _peak(model: str, groups: Sequence[Group], wanted: float, lowest: Lowest, where: str) -> str:
    best = max(groups, key=lowest)
    share = lowest(best)
    how = "measured" if best.is_measured else "predicted"
    return (
        f"{model}: peak {wanted:.1%} below sparse-only, {where}: {_verdict(share >= wanted)}: "
        f"{share:.1%} ({how}, {best.batch_size} samples, momentum {best.momentum:g})"
    )


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
        f"(estimated). A larger batch brings only what of a step does not grow with it, "
        f"{model.fixed_share:.0%} of a dense one here, and what of the messages it hides"
    )
