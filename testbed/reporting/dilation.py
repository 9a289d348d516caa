"""Whether the time of a replayed cell is the cluster's, or this machine's at its dilation."""

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

# Plans of few messages that kept the two cores 73 to 81 % busy at dilation 10 took 1.4 times as
# long as at 40, where they kept them 41 to 49 % busy.
BUSY_CORES: Final = 0.75

Verdict = Literal["", "depends on dilation", "dilation not checked", "cores busy"]
UNRANKED: Final = frozenset(get_args(Verdict)) - {""}  # verdicts of cells that are not ranked


def dilation_verdict(
    num_messages: int, times_s: Mapping[float, float], cores_busy: float | None = None
) -> Verdict:
    """What the times of one cell at several dilations tell; empty: they are the cluster's.

    With dilation D the network and the replayed compute take D times as long, the work of the hosts
    for a message does not: it seems to take 1 / D. A plan of few messages has little of it, unless
    its bytes keep the cores busy. One of more than 32 a step, or whose cores were busy for 75 % of
    the time or more, is held to

        |T(D') / T(D) - 1| < 5 %,   D the smallest dilation, D' the smallest of at least 4 D

    Args:
        num_messages: of a step.
        times_s: dilation -> step in the emulated cluster's seconds.
        cores_busy: share of the time in which the cores were; None: not recorded.

    Example:
        >>> dilation_verdict(200, {10.0: 0.193, 40.0: 0.1445})
        'depends on dilation'
        >>> dilation_verdict(200, {10.0: 0.145, 40.0: 0.1445}), dilation_verdict(3, {10.0: 0.2})
        ('', '')
        >>> dilation_verdict(200, {10.0: 0.193})
        'dilation not checked'
        >>> dilation_verdict(8, {10.0: 0.2}, cores_busy=0.78)
        'cores busy'
    """
    many = num_messages > MANY_MESSAGES
    if not (many or (cores_busy or 0.0) >= BUSY_CORES) or set(times_s) == {1.0}:
        return ""
    least = min(times_s)
    apart = [dilation for dilation in times_s if dilation >= APART * least]
    if not apart:
        return "dilation not checked" if many else "cores busy"
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
        ""
        if key not in measured
        else dilation_verdict(cell.num_messages or 0, measured[key], cell.cores_busy)
        for key, cell in zip(keys, cells, strict=True)
    ]


def describe_dilation(cells: Sequence[ReportCell]) -> list[str]:
    """Notes of a report: what the words in the ranking mean, where they occur."""
    held = f"plans of more than {MANY_MESSAGES} messages a step"
    busy = f"keep the cores busy for {100 * BUSY_CORES:.0f} % of the time or more"
    notes = []
    if any(cell.rank_note == "depends on dilation" for cell in cells):
        notes.append(
            f"depends on dilation: of {held}, and of others that {busy}; steps at two dilations, "
            f"one at least {APART:g} times the other, differ by {100 * AGREE:.0f} % or more: part "
            "of the time is the work of this machine's cores, not the network's, and the cell is "
            "not ranked"
        )
    if any(cell.rank_note == "dilation not checked" for cell in cells):
        notes.append(
            f"dilation not checked: of {held}; measure them at {APART:g} times the dilation as "
            "well (with --cluster), and report both sweeps together; until then they are not ranked"
        )
    if any(cell.rank_note == "cores busy" for cell in cells):
        notes.append(
            f"cores busy: the emulated nodes {busy}, so that a time at this dilation tells of this "
            f"machine's cores as well; measure these cells at {APART:g} times the dilation, and "
            "report both sweeps together; until then they are not ranked"
        )
    return notes
