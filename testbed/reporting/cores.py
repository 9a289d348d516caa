"""What the cores of the machine had to do with the times: too busy, or given to others."""

from __future__ import annotations

from collections.abc import Sequence

from testbed.noise.steady import QUIET, steady_steps
from testbed.noise.steal_time import NOTICED, TOO_MUCH, describe_stolen, lost_of, stolen_of
from testbed.records.cell import Cell
from testbed.reporting.naming import short_name

BUSY = 0.9  # from here on messages wait for cores as well as for the network


def core_words(cell: Cell) -> str:
    """How busy the cores were in a cell; empty where that was not recorded.

    Example:
        >>> from testbed.base.config import RunConfig
        >>> core_words(Cell(backend="gloo", workload="w", num_workers=2, config=RunConfig(),
        ...                 cores_busy=0.5, cores_stolen=0.02))
        '50 % busy; stolen by the host of this virtual machine: 2.0 % during the steps'
    """
    if cell.cores_busy is None:
        return ""
    words = f"{100 * cell.cores_busy:.0f} % busy"
    stolen = stolen_of(cell)
    if stolen is not None and stolen >= NOTICED:
        words += f"; stolen by the host of this virtual machine: {describe_stolen(cell)}"
    if (cell.cores_outside or 0.0) >= NOTICED:
        words += f"; taken by other processes: {100 * (cell.cores_outside or 0.0):.1f} %"
    steady, counting = _steps(cell)
    if len(counting) < len(steady):
        kind = "steady steps" if any(cell.samples.unsteady) else "steps"
        words += f"; times are of {len(counting)} of {len(steady)} {kind}, "
        words += f"which lost at most {100 * max(counting):.1f} %"
    if is_core_bound(cell):
        words += "; the time tells of them as well as of the network"
    return words


def is_core_bound(cell: Cell) -> bool:
    """Whether cores were busy although the workload is replayed, which only waits."""
    replayed = cell.data.startswith("replayed")
    return replayed and cell.cores_busy is not None and cell.cores_busy >= BUSY


def describe_cores(cells: Sequence[Cell]) -> list[str]:
    """Notes of a report: where cores were busy all the time, and where their time was stolen.

    Args:
        cells: each run by itself, before repeats are put together.
    """
    notes = []
    bound = [f"{_name(c)} ({100 * (c.cores_busy or 0):.0f} %)" for c in cells if is_core_bound(c)]
    if bound:
        notes.append(
            f"the cores were busy for {100 * BUSY:.0f} % of the time or more though the workload "
            "only waits, so that these times tell of the cores as well as of the network: "
            + ", ".join(bound)
        )
    known = [(share, _name(cell)) for cell in cells if (share := stolen_of(cell)) is not None]
    lost = [pair for pair in known if pair[0] >= NOTICED]
    if lost:
        most, where = max(lost)
        notes.append(
            f"the host of this virtual machine took {100 * NOTICED:.0f} % of the cores' time or "
            f"more in {len(lost)} of {len(known)} runs, most in {where} ({100 * most:.1f} %): "
            "repeat what lies close together"
        )
    beside = [(c.cores_outside, _name(c)) for c in cells if c.cores_outside is not None]
    if lost := [pair for pair in beside if pair[0] >= NOTICED]:
        most, where = max(lost)
        notes.append(
            f"processes outside the cell took {100 * NOTICED:.0f} % of the cores' time or more in "
            f"{len(lost)} of {len(beside)} runs, most in {where} ({100 * most:.1f} %)"
        )
    return notes


def describe_counted(cells: Sequence[Cell]) -> list[str]:
    """A note of a report: how many steps do not count because others had the cores.

    Args:
        cells: as for `describe_cores`.
    """
    numbers = [(len(steady), len(counting)) for steady, counting in map(_steps, cells)]
    disturbed = [(steady, counting) for steady, counting in numbers if counting < steady]
    if not disturbed:
        return []
    return [
        "step times are of steps in which the host of a virtual machine and processes outside "
        f"the cell took at most {100 * QUIET:.0f} % of the cores' time, or which lost least "
        "of their run (four, and a third): "
        f"{sum(all_ - n for all_, n in disturbed)} of {sum(n for n, _ in disturbed)} steps of "
        f"{len(disturbed)} runs do not count, whatever they took"
    ]


def describe_again(cells: Sequence[Cell]) -> list[str]:
    """Notes of a report: each run that took another's place or kept its own, and how many did not.

    Args:
        cells: as for `describe_cores`.
    """
    notes = [f"{_name(cell)}: {cell.again}" for cell in cells if cell.again]
    left = [c for c in cells if not c.again and (lost_of(c) or 0.0) >= TOO_MUCH]
    if notes and left:
        notes.append(
            f"{len(left)} more runs lost {100 * TOO_MUCH:.0f} % or more of what counts and "
            "were not run again"
        )
    return notes


def _steps(cell: Cell) -> tuple[list[float], list[float]]:
    """What others took in the steady steps, and in those of them that count."""
    taken, unsteady = cell.samples.cores_taken, cell.samples.unsteady
    return steady_steps(taken, (), unsteady), steady_steps(taken, taken, unsteady)


def _name(cell: Cell) -> str:
    return f"{cell.scheduler} in {short_name(cell)}"
