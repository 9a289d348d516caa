"""Whether the time of an emulated cell is the cluster's, or this machine's at its dilation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal, get_args

from testbed.records.report import ReportCell
from testbed.reporting.work import apart_from_dilation

# Of each message four nodes on two cores have some 0.3 ms of work each, so 0.6 ms together, which
# no dilation stretches: 32 of them are 1 % of a step that takes 2 s here.
MANY_MESSAGES: Final = 32
AGREE: Final = 0.05
APART: Final = 4.0

# Of 18 cells of few messages that keep two cores 48 to 80 % busy at dilation 10, and that were run
# at 40 as well, 13 take 1.08 to 1.39 times as long at 10; one that keeps them 29 % busy at 40 takes
# 1.045 times as long as at 160.
BUSY_CORES: Final = 0.4

Verdict = Literal["", "depends on dilation", "dilation not checked", "cores busy"]
UNRANKED: Final = frozenset(get_args(Verdict)) - {""}  # verdicts of cells that are not ranked


def dilation_verdict(
    num_messages: int, times_s: Mapping[float, float], at: float, cores_busy: float | None = None
) -> Verdict:
    """What a cell's times at several dilations tell of one of them; empty: it is the cluster's.

    With dilation D the network and the replayed compute take D times as long, the work of the hosts
    for a message does not: it seems to take 1 / D. So a time is the cluster's if it lies between
    two dilations that agree:

        |T(D2) / T(D1) - 1| < 5 %,   D1 <= D <= D2,   D2 >= 4 D1

    Where there are no two such dilations, a plan of more than 32 messages a step, or one whose
    cores were busy for 40 % of the time or more, is not checked; one of few messages has little of
    that work unless its bytes keep the cores busy, and is taken as it is. Undilated cells (D = 1)
    are held to all of this, for their nodes share the cores as well.

    Args:
        num_messages: of a step.
        times_s: dilation -> step in the emulated cluster's seconds.
        at: the dilation of the cell, D.
        cores_busy: share of the time in which the cores were; None: not recorded.

    Example:
        >>> dilation_verdict(200, {10.0: 0.193, 40.0: 0.1445}, 40.0)
        'depends on dilation'
        >>> dilation_verdict(200, {10.0: 0.193, 20.0: 0.146, 80.0: 0.1445}, 40.0)
        ''
        >>> dilation_verdict(200, {10.0: 0.193}, 10.0), dilation_verdict(3, {10.0: 0.2}, 10.0)
        ('dilation not checked', '')
        >>> dilation_verdict(8, {10.0: 0.2}, 10.0, cores_busy=0.45)
        'cores busy'
    """
    around = [
        abs(times_s[more] / times_s[less] - 1)
        for less in times_s
        for more in times_s
        if less <= at <= more and more >= APART * less
    ]
    if around:
        return "" if min(around) < AGREE else "depends on dilation"
    if num_messages > MANY_MESSAGES:
        return "dilation not checked"
    return "cores busy" if (cores_busy or 0.0) >= BUSY_CORES else ""


def dilation_verdicts(cells: Sequence[ReportCell]) -> list[Verdict]:
    """The verdict on each cell: what it took at every dilation that the report holds counts.

    Where several folders have it at another dilation, its own folder counts, else the time that
    lies farthest from its own. Cells outside an emulated cluster, and those that failed, have none
    to be held to.
    """
    measured: dict[object, list[ReportCell]] = {}
    keys = [apart_from_dilation(cell) if cell.cluster is not None else None for cell in cells]
    for key, cell in zip(keys, cells, strict=True):
        if key is not None and cell.step_time_s is not None:
            measured.setdefault(key, []).append(cell)
    return [
        ""
        if key is None or cell.step_time_s is None
        else dilation_verdict(
            cell.num_messages or 0, _times_s(cell, measured[key]), cell.dilation, cell.cores_busy
        )
        for key, cell in zip(keys, cells, strict=True)
    ]


def _times_s(cell: ReportCell, measured: Sequence[ReportCell]) -> dict[float, float]:
    """Dilation -> the cluster's time; see `dilation_verdicts`."""
    own_s = (cell.step_time_s or 0.0) / cell.dilation
    found: dict[float, float] = {}
    for dilation in sorted({other.dilation for other in measured} - {cell.dilation}):
        there = [other for other in measured if other.dilation == dilation]
        there = [other for other in there if other.source == cell.source] or there
        times_s = [(other.step_time_s or 0.0) / dilation for other in there]
        found[dilation] = max(times_s, key=lambda time_s: abs(time_s / own_s - 1))
    return found | {cell.dilation: own_s}


def describe_dilation(cells: Sequence[ReportCell]) -> list[str]:
    """Notes of a report: what the words in the ranking mean, where they occur."""
    held = f"plans of more than {MANY_MESSAGES} messages a step"
    busy = f"keep the cores busy for {100 * BUSY_CORES:.0f} % of the time or more"
    slower = f"{APART:g} times the dilation (of a workload that computes itself: on more cores)"
    notes = []
    if any(cell.rank_note == "depends on dilation" for cell in cells):
        notes.append(
            f"depends on dilation: steps at two dilations around it, one at least {APART:g} times "
            f"the other, differ by {100 * AGREE:.0f} % or more: part of the time is the work of "
            "this machine's cores, not the network's, and the cell is not ranked"
        )
    if any(cell.rank_note == "dilation not checked" for cell in cells):
        notes.append(
            f"dilation not checked: of {held}; measure them at {slower} as well (with --cluster), "
            "and report both sweeps together; until then they are not ranked"
        )
    if any(cell.rank_note == "cores busy" for cell in cells):
        notes.append(
            f"cores busy: the emulated nodes {busy}, so that a time at this dilation tells of this "
            f"machine's cores as well; measure these cells at {slower}, and "
            "report both sweeps together; until then they are not ranked"
        )
    return notes
