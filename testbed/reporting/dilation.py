"""Whether the time of a replayed cell is the cluster's, or this machine's at its dilation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

from testbed.records.report import ReportCell
from testbed.reporting.work import apart_from_dilation

# Of each message four nodes on two cores have some 0.3 ms of work each, so 0.6 ms together, which
# no dilation stretches: 32 of them are 1 % of a step that takes 2 s here.
MANY_MESSAGES: Final = 32
AGREE: Final = 0.05
APART: Final = 4.0

Verdict = Literal["", "depends on dilation", "dilation not checked"]


def dilation_verdict(num_messages: int, times_s: Mapping[float, float]) -> Verdict:
    """What the times of one cell at several dilations tell; empty: they are the cluster's.

    With dilation D the network and the replayed compute take D times as long, the work of the hosts
    for a message does not: it seems to take 1 / D. A plan of few messages has little of it. One of
    more than 32 a step is held to

        |T(D') / T(D) - 1| < 5 %,   D the smallest dilation, D' the smallest of at least 4 D

    Args:
        num_messages: of a step.
        times_s: dilation -> step in the emulated cluster's seconds.

    Example:
        >>> dilation_verdict(200, {10.0: 0.193, 40.0: 0.1445})
        'depends on dilation'
        >>> dilation_verdict(200, {10.0: 0.145, 40.0: 0.1445}), dilation_verdict(3, {10.0: 0.2})
        ('', '')
        >>> dilation_verdict(200, {10.0: 0.193})
        'dilation not checked'
    """
    if num_messages <= MANY_MESSAGES or set(times_s) == {1.0}:
        return ""
    least = min(times_s)
    apart = [dilation for dilation in times_s if dilation >= APART * least]
    if not apart:
        return "dilation not checked"
    ratio = times_s[min(apart)] / times_s[least]
    return "" if abs(ratio - 1) < AGREE else "depends on dilation"


def dilation_verdicts(cells: Sequence[ReportCell]) -> list[Verdict]:
    """The verdict on each cell: what it took at every dilation that the report holds counts.

    Cells outside an emulated cluster, and those that failed, have none to be held to.
    """
    measured: dict[object, dict[float, float]] = {}
    keys = [apart_from_dilation(cell) if cell.cluster is not None else None for cell in cells]
    for key, cell in zip(keys, cells, strict=True):
        if key is not None and cell.step_time_s is not None:
            measured.setdefault(key, {})[cell.dilation] = cell.step_time_s / cell.dilation
    return [
        "" if key not in measured else dilation_verdict(cell.num_messages or 0, measured[key])
        for key, cell in zip(keys, cells, strict=True)
    ]


def describe_dilation(cells: Sequence[ReportCell]) -> list[str]:
    """Notes of a report: what the words in the ranking mean, where they occur."""
    held = f"plans of more than {MANY_MESSAGES} messages a step"
    notes = []
    if any(cell.rank_note == "depends on dilation" for cell in cells):
        notes.append(
            f"depends on dilation: of {held}; steps at two dilations, one at least {APART:g} times "
            f"the other, differ by {100 * AGREE:.0f} % or more: part of the time is the work of "
            "this machine's cores, not the network's, and the cell is not ranked"
        )
    if any(cell.rank_note == "dilation not checked" for cell in cells):
        notes.append(
            f"dilation not checked: of {held}; measure them at {APART:g} times the dilation as "
            "well (with --cluster), and report both sweeps together; until then they are not ranked"
        )
    return notes
