"""Tells how far a sweep has come: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from testbed.base.axes import AXES
from testbed.base.config import RunConfig
from testbed.base.units import format_seconds


class Reporter(Protocol):
    """Hears of each run of a cell."""

    def started(self, config: RunConfig) -> None:
        """A cell starts."""
        ...

    def ended(self, config: RunConfig, status: str, time_s: float, error: str) -> None:
        """A cell ended, finished or failed, after so many seconds."""
        ...


def label(config: RunConfig) -> str:
    """A cell in a few words.

    Example:
        >>> label(RunConfig(backend="gloo", scheduler="dear", workers=4, repeat=1))
        'digits-cnn, gloo, dear, 4 workers, repeat 2'
    """
    chosen = [axis.of(config) for axis in AXES if axis.shown or not axis.is_default(config)]
    workers = f"{config.workers} worker{'s' if config.workers != 1 else ''}"
    return ", ".join([*chosen, workers, f"repeat {config.repeat + 1}"])


def remaining_s(measured_s: Mapping[str, Sequence[float]], pending: Sequence[str]) -> float | None:
    """Seconds that the pending runs will take, from the runs of like cells so far.

    Args:
        measured_s: kind of cell -> times of its runs so far.
        pending: kind of each run that is still to come.

    Returns:
        The sum over the pending runs of the median of their kind, or of all runs where the kind
        was not run yet; None before the first run.

    Example:
        >>> remaining_s({"gloo": [8.0, 10.0]}, ["gloo", "mpi"])
        18.0
    """
    everything = [t for times in measured_s.values() for t in times]
    if not everything:
        return None
    overall = statistics.median(everything)
    return sum(
        statistics.median(measured_s[kind]) if measured_s.get(kind) else overall for kind in pending
    )


class _Tally:
    """Which runs are still to come and how long those of their kind took."""

    def __init__(self, pending: Sequence[RunConfig]) -> None:
        self.pending = [_kind(config) for config in pending]
        self.total = len(pending)
        self.measured_s: dict[str, list[float]] = {}

    def count(self, config: RunConfig, time_s: float) -> None:
        self.pending.remove(_kind(config))
        self.measured_s.setdefault(_kind(config), []).append(time_s)

    @property
    def number(self) -> int:
        return self.total - len(self.pending)

    def remaining(self) -> str:
        left_s = remaining_s(self.measured_s, self.pending)
        return "" if left_s is None else f"about {format_seconds(left_s)} left"


def _kind(config: RunConfig) -> str:
    return " ".join([*(a.of(config) for a in AXES if a.shown), str(config.workers)])


class _Lines:
    def __init__(self, tally: _Tally, out: TextIO) -> None:
        self.tally, self.out = tally, out

    def started(self, config: RunConfig) -> None:
        number = self.tally.number + 1
        self._say(f"[{number}/{self.tally.total}] {label(config)} ...")

    def ended(self, config: RunConfig, status: str, time_s: float, error: str) -> None:
        self.tally.count(config, time_s)
        left = f", {self.tally.remaining()}" if self.tally.pending else ""
        number = self.tally.number
        self._say(
            f"[{number}/{self.tally.total}] {label(config)}: {status} in "
            f"{format_seconds(time_s)}{left}"
        )
        if error:
            self._say(f"    {last_line(error)}")

    def _say(self, text: str) -> None:
        print(text, file=self.out, flush=True)


class _Bar:
    def __init__(self, tally: _Tally, progress: Progress) -> None:
        self.tally, self.progress = tally, progress
        self.task = progress.add_task("", total=tally.total, left="")

    def started(self, config: RunConfig) -> None:
        self.progress.update(self.task, description=label(config))

    def ended(self, config: RunConfig, status: str, time_s: float, error: str) -> None:
        self.tally.count(config, time_s)
        self.progress.update(self.task, advance=1, left=self.tally.remaining())
        if error:
            text = f"{label(config)}: {status}: {last_line(error)}"
            self.progress.console.print(text, markup=False, highlight=False)


def last_line(error: str) -> str:
    r"""The line of an error that says what happened: of a traceback, the last.

    Example:
        >>> last_line("exit status 1\nTraceback ...\nRankLost: rank 1")
        'RankLost: rank 1'
    """
    lines = error.strip().splitlines()
    return lines[-1].strip() if lines else ""


@contextmanager
def reporting(pending: Sequence[RunConfig], out: TextIO) -> Iterator[Reporter]:
    """A reporter on this stream for these runs."""
    tally = _Tally(pending)
    if not out.isatty():
        yield _Lines(tally, out)
        return
    columns = (
        MofNCompleteColumn(),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[left]}", markup=False),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=Console(file=out)) as progress:
        yield _Bar(tally, progress)
