"""Limits on how much worse one side may be: `step_time_s > 3%`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from testbed.base.errors import UsageError
from testbed.base.units import parse_bytes, parse_seconds
from testbed.records.diff import CellDiff, Diff, Gated, MetricDiff
from testbed.reporting.diff import METRICS, metric_of

HELD, BREACHED, UNDECIDED = 0, 1, 3
"""Exit statuses; 2 is that of a command that was asked for wrongly."""

_UNITS: Final[dict[str, Callable[[str], float]]] = {"s": parse_seconds, "B": parse_bytes}
_FORM = "expected METRIC > LIMIT or METRIC < -LIMIT, as 'step_time_s > 3%'"


@dataclass(frozen=True)
class Limit:
    """How far B may lie above A in a metric, or below it.

    Attributes:
        text: as it was given.
        metric: its name.
        above: B must not lie above A by more than the limit; else not below it.
        size: of the limit, 0 or more: a share of A, or in the metric's unit.
        is_share: which of them.
    """

    text: str
    metric: str
    above: bool
    size: float
    is_share: bool


def parse_limit(text: str) -> Limit:
    """A limit as the command line has it.

    Raises:
        UsageError: it cannot be read, there is no such metric, or its sign makes no sense.

    Example:
        >>> parse_limit("step_time_s > 3%").size
        0.03
        >>> found = parse_limit("samples_per_s < -5%")
        >>> found.above, found.size
        (False, 0.05)
        >>> parse_limit("peak_memory_bytes>100MB").size
        104857600.0
    """
    found = re.fullmatch(r"\s*(\w+)\s*([<>])\s*([+-]?)\s*([\d.]+\s*[\w/]*)\s*(%?)\s*", text)
    if found is None:
        raise UsageError(f"--fail-if is {text!r}; {_FORM}")
    name, operator, sign, number, percent = found.groups()
    metric = metric_of(name)
    try:
        read = float if percent else _UNITS.get(metric.unit, float)
        size = float(read(number))
    except ValueError as error:
        raise UsageError(f"--fail-if is {text!r}: {error}; {_FORM}") from None
    if size and (operator == ">") == (sign == "-"):
        raise UsageError(
            f"--fail-if is {text!r}: a limit on the difference B - A; {_FORM}; of what should not "
            f"fall, as '{name} < -3%'"
        )
    return Limit(text.strip(), name, operator == ">", size / (100 if percent else 1), bool(percent))


def gate(found: Diff, limits: Sequence[Limit]) -> tuple[Gated, ...]:
    """What each limit says of each cell of A.

    Breached: the difference is significant and beyond the limit; or a cell that finished in A
    failed in B. Undecided: not breached, and the runs could not have told a difference of the
    limit's size (the interval reaches beyond it), did other work, failed more often in B, or are
    not there; or no cell of A finished. What failed in A guards nothing, whether B has it or not. A
    limit of 0 allows no significant difference at all; whatever is not significant holds it.
    """
    gated = [_gate(cell, limit) for limit in limits for cell in found.cells]
    missing = [
        Gated(limit=limit.text, cell=cell, verdict="undecided", why="B has no such cell")
        for limit in limits
        for cell, runs in zip(found.only_a, found.runs_only_a, strict=True)
        if runs
    ]
    judged = (*(each for each in gated if each is not None), *missing)
    return judged or tuple(
        Gated(limit=limit.text, cell="all", verdict="undecided", why="no cell of A finished")
        for limit in limits
    )


def status_of(gated: Sequence[Gated]) -> int:
    """The exit status: a breach counts more than what could not be decided."""
    verdicts = {each.verdict for each in gated}
    if "breached" in verdicts:
        return BREACHED
    return UNDECIDED if "undecided" in verdicts else HELD


def _gate(cell: CellDiff, limit: Limit) -> Gated | None:
    """None: A has no finished run that anything could be worse than."""

    def told(verdict: Literal["breached", "held", "undecided"], why: str) -> Gated:
        return Gated(limit=limit.text, cell=cell.label, verdict=verdict, why=why)

    if not cell.runs_a:
        return None
    if not cell.runs_b:
        return told("breached", "it finished in A and failed in B")
    one = cell.of(limit.metric)
    if one is None:
        return told("undecided", "not recorded on both sides")
    if one.verdict == "other work":
        return told("undecided", f"not the same work: {cell.work}")
    apart = one.share if limit.is_share else one.difference
    if limit.is_share and apart is None and (not one.difference or not limit.size):
        apart = one.difference  # nothing of 0 is no change; of a limit of 0 the sign counts alone
    beyond = apart is not None and (apart > limit.size if limit.above else apart < -limit.size)
    if one.verdict == "one seed" and apart is not None and cell.failed_b <= cell.failed_a:
        words = f"{_words(limit, one, apart)}: repeats of it tell nothing of other seeds"
        return told("undecided" if beyond else "held", words)
    if one.p_value is None:
        runs = f"{cell.runs_a} run(s) in A, {cell.runs_b} in B"
        return told("undecided", f"{runs}: no interval; two or more are needed, five are better")
    if apart is None or one.resolves is None:
        return told("undecided", "A is 0: there is no share of it; give a limit in the unit")
    words = _words(limit, one, apart)
    if one.is_significant and beyond:
        return told("breached", words)
    is_same = not one.difference and not one.resolves
    if limit.size and not is_same and _reach(limit, one, one.resolves) > limit.size:
        return told("undecided", f"{words}; the interval reaches beyond the limit")
    if cell.failed_b > cell.failed_a:
        return told("undecided", f"{cell.failed_b} run(s) failed in B, {cell.failed_a} in A")
    return told("held", words)


def _reach(limit: Limit, one: MetricDiff, resolves: float) -> float:
    """How far in the limit's direction the interval of the difference reaches."""
    if one.low is None or one.high is None:  # A is 0
        low, high = one.difference - resolves, one.difference + resolves
    else:
        scale = 1.0 if limit.is_share else abs(one.a)
        low, high = one.low * scale, one.high * scale
    return high if limit.above else -low


def _words(limit: Limit, one: MetricDiff, apart: float) -> str:
    ends = "" if one.low is None or one.high is None else f" [{100 * one.low:.2f}, "
    ends += f"{100 * (one.high or 0):.2f}]" if ends else ""
    share = "" if one.share is None else f"{100 * one.share:+.2f} %{ends}"
    if limit.is_share:
        return f"{share}, {one.verdict}"
    return f"{apart:+.4g} {_unit(limit)}".strip() + f" ({share}), {one.verdict}"


def _unit(limit: Limit) -> str:
    return METRICS[limit.metric].unit
