"""Runs disturbed cells once more at the end of a sweep, and keeps both runs; see `again`."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TextIO

from testbed.records.disturbed import TOO_MUCH
from testbed.records.store import Store, SweepPlan
from testbed.sweeping.again import choose, to_repeat
from testbed.sweeping.executor import Runner
from testbed.sweeping.progress import reporting
from testbed.units import format_seconds


@dataclass(frozen=True)
class TimeLeft:
    """What is left for runs again.

    Attributes:
        began_s: when the sweep began, or what goes on with it.
        within_min: minutes from there; None = without end.
        longest_s: of the runs since then; each run again is taken to need as much, so that slow
            cells have the same chance as fast ones. 0 before the first one: that one may be late.
    """

    began_s: float
    within_min: float | None
    longest_s: float

    def suffices(self) -> bool:
        """Whether another run will be done."""
        if self.within_min is None:
            return True
        return time.monotonic() + self.longest_s <= self.began_s + 60 * self.within_min


def run_again(store: Store, plan: SweepPlan, runner: Runner, left: TimeLeft, out: TextIO) -> None:
    """Repeat what a virtual machine's host disturbed most, as far as the plan and time let.

    Args:
        store: locked, with all cells that could be measured.
        plan: the store's.
        runner: runs one cell.
        left: until when.
        out: where progress is told.
    """
    cells, configs = store.read_cells(), dict(plan.runs())
    present = {key: cells[key] for key in configs if key in cells}
    repeated = store.repeated()
    keys = to_repeat(present, repeated, plan.max_again)
    if not keys:
        if plan.max_again:
            print(_why_none(len(repeated), plan.max_again), file=out)
        return
    end = "" if left.within_min is None else f", as far as {left.within_min:g} minutes reach"
    print(
        f"{len(keys)} runs again, of which the host of this virtual machine took "
        f"{100 * TOO_MUCH:.0f} % of the cores' time or more, of what counts{end}",
        file=out,
    )
    store.make_others()
    with reporting([configs[key] for key in keys], out) as reporter:
        for number, key in enumerate(keys):
            if not left.suffices():
                print(_why_no_more(len(keys) - number, left), file=out)
                break
            reporter.started(configs[key])
            begin_s = time.monotonic()
            result, log = store.scratch / f"{key}-2.json", store.others / f"{key}-2.log"
            cell = runner(configs[key], result, log)
            store.write_pair(key, *choose(cells[key], cell))
            time_s = time.monotonic() - begin_s
            reporter.ended(configs[key], cell.status, time_s, cell.error)
            left = replace(left, longest_s=max(left.longest_s, time_s))


def _why_no_more(num_left: int, left: TimeLeft) -> str:
    return (
        f"{num_left} of them not: after {left.within_min:g} minutes none may be at work, and one "
        f"takes up to {format_seconds(left.longest_s)}; again with --resume"
    )


def _why_none(num_repeated: int, max_again: int) -> str:
    if num_repeated >= max_again:
        return f"{num_repeated} runs were run again before: no more than {max_again} may be"
    return (
        f"no other run lost {100 * TOO_MUCH:.0f} % of the cores' time or more of what counts to "
        "the host of this virtual machine: none is run again"
    )
