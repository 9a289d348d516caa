"""Tells how far a sweep has come: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TextIO

from rich.progress import Progress

from testbed.base.axes import AXES
from testbed.base.config import RunConfig
from testbed.base.units import format_seconds
from testbed.records.progress import (
    EVERY_S,
    LINES_EVERY_S,
    again_and_again,
    bar,
    read_progress,
)

SAID = re.compile(r"testbed: (?:rank \d+[^:]*: )?(?P<kind>[A-Z]\w+): (?P<text>.+)")
# What others failed of, they waited for; which rank a signal ended, only the launcher knows.
TOLD_LAST = {"UsageError": 0, "DeadlineExceeded": 2, "RankLost": 3}


class Reporter(Protocol):
    """Hears of each run of a cell."""

    def started(self, config: RunConfig, told: Path) -> None:
        """A cell starts; its rank 0 tells in this file how far it is."""
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
    return f"{chosen(config)}, repeat {config.repeat + 1}"


def chosen(config: RunConfig) -> str:
    """What was chosen for a cell, whichever repeat it is.

    Example:
        >>> chosen(RunConfig(backend="gloo", workers=1))
        'digits-cnn, gloo, 1 worker'
    """
    parts = [axis.of(config) for axis in AXES if axis.shown or not axis.is_default(config)]
    workers = f"{config.workers} worker{'s' if config.workers != 1 else ''}"
    return ", ".join([*parts, workers])


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


@dataclass(frozen=True)
class _Running:
    kind: str
    told: Path
    began_s: float


class _Tally:
    """Which runs are still to come and how long those of their kind took."""

    def __init__(self, pending: Sequence[RunConfig]) -> None:
        self.pending = [_kind(config) for config in pending]
        self.total = len(pending)
        self.measured_s: dict[str, list[float]] = {}
        self.running: _Running | None = None

    def start(self, config: RunConfig, told: Path) -> None:
        self.running = _Running(_kind(config), told, time.monotonic())

    def count(self, config: RunConfig, time_s: float) -> None:
        self.running = None
        self.pending.remove(_kind(config))
        self.measured_s.setdefault(_kind(config), []).append(time_s)

    @property
    def number(self) -> int:
        return self.total - len(self.pending)

    def remaining(self) -> str:
        """In words, less what the run that is under way has had of its time."""
        measured_s, running = dict(self.measured_s), self.running  # another thread may ask
        left_s = remaining_s(measured_s, list(self.pending))
        if left_s is None or not self.pending:
            return ""
        if running is not None:
            own_s = remaining_s(measured_s, [running.kind]) or 0.0
            left_s -= min(own_s, time.monotonic() - running.began_s)
        return f"about {format_seconds(left_s)} left"


def _kind(config: RunConfig) -> str:
    return " ".join([*(a.of(config) for a in AXES if a.shown), str(config.workers)])


class _Silent:
    def __init__(self, out: TextIO) -> None:
        self.out = out

    def started(self, config: RunConfig, told: Path) -> None:
        """See `Reporter.started`."""

    def ended(self, config: RunConfig, status: str, time_s: float, error: str) -> None:
        """A failure is told all the same."""
        if error:
            print(f"{label(config)}: {status}: {last_line(error)}", file=self.out, flush=True)


class _Lines:
    def __init__(self, tally: _Tally, out: TextIO) -> None:
        self.tally, self.out = tally, out

    def started(self, config: RunConfig, told: Path) -> None:
        self.tally.start(config, told)
        self._say(f"[{self.tally.number + 1}/{self.tally.total}] {label(config)} ...")

    def tick(self) -> None:
        """Once in a while: how far the cell is that runs."""
        running = self.tally.running
        told = None if running is None else read_progress(running.told)
        if running is not None and told is not None and told.done:
            passed = format_seconds(time.monotonic() - running.began_s)
            self._say(f"    after {passed}: {told.line}{self._left()}")

    def ended(self, config: RunConfig, status: str, time_s: float, error: str) -> None:
        self.tally.count(config, time_s)
        number = self.tally.number
        self._say(
            f"[{number}/{self.tally.total}] {label(config)}: {status} in "
            f"{format_seconds(time_s)}{self._left()}"
        )
        if error:
            self._say(f"    {last_line(error)}")

    def _left(self) -> str:
        left = self.tally.remaining()
        return f", {left} of the sweep" if left else ""

    def _say(self, text: str) -> None:
        print(text, file=self.out, flush=True)


class _Bar:
    def __init__(self, tally: _Tally, progress: Progress) -> None:
        self.tally, self.progress = tally, progress
        self.task = progress.add_task("", total=tally.total, left="", now="")

    def started(self, config: RunConfig, told: Path) -> None:
        self.tally.start(config, told)
        self.progress.update(self.task, description=label(config))
        self.tick()

    def tick(self) -> None:
        """Draw it anew."""
        running = self.tally.running
        told = None if running is None else read_progress(running.told)
        now = ""
        if told is not None and told.done:
            now = f"step {told.done} of {told.total}, {format_seconds(told.step_s)} each"
        self.progress.update(self.task, now=now, left=self.tally.remaining())
        self.progress.refresh()

    def ended(self, config: RunConfig, status: str, time_s: float, error: str) -> None:
        self.tally.count(config, time_s)
        self.progress.update(self.task, advance=1)
        self.tick()
        if error:
            text = f"{label(config)}: {status}: {last_line(error)}"
            self.progress.console.print(text, markup=False, highlight=False)


def last_line(error: str) -> str:
    r"""The line of an error that says what happened: of a traceback, the last; empty: none does.

    What a rank found wrong with its input, or failed of, says more than that it ended; that it lost
    another does so but where a signal ended that one.

    Example:
        >>> last_line("exit status 1\nTraceback ...\nRankLost: rank 1")
        'RankLost: rank 1'
        >>> last_line("testbed: rank 1: UsageError: no option 'x'\nmpirun exited with status 2")
        "no option 'x'"
        >>> last_line("testbed: rank 1 (host a, pid 7): ValueError: 3\nrank 1 exited with status 1")
        'ValueError: 3'
        >>> lost = "testbed: rank 0 (host a, pid 6): RankLost: rank 1 is lost: silent for 5.0 s\n"
        >>> last_line(lost + "rank 0, the first to end, exited with status 1")
        'RankLost: rank 1 is lost: silent for 5.0 s'
        >>> last_line(lost + "rank 1 was ended by SIGKILL")
        'rank 1 was ended by SIGKILL'
    """
    lines = error.strip().splitlines()
    said = [found for line in lines if (found := SAID.match(line))]
    told = min(said, key=lambda one: TOLD_LAST.get(one["kind"], 1), default=None)
    if told is None or (told["kind"] == "RankLost" and "was ended by" in lines[-1]):
        return lines[-1].strip() if lines else ""
    return told["text"] if told["kind"] == "UsageError" else f"{told['kind']}: {told['text']}"


@contextmanager
def reporting(
    pending: Sequence[RunConfig], out: TextIO, *, quiet: bool = False
) -> Iterator[Reporter]:
    """A reporter on this stream for these runs; a quiet one tells failures alone."""
    tally = _Tally(pending)
    if quiet:
        yield _Silent(out)
    elif out.isatty():
        with bar(out, before=("left", "now")) as progress:
            shown = _Bar(tally, progress)
            with again_and_again(shown.tick, EVERY_S):
                yield shown
    else:
        lines = _Lines(tally, out)
        with again_and_again(lines.tick, LINES_EVERY_S):
            yield lines
