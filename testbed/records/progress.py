"""How far a run is: rank 0 leaves it in a file, and whoever started it shows it.

A rank costs its step nothing but a reference that is kept (`Observer.after_step`); a thread of its
own reads that once a second and writes the file that `TESTBED_PROGRESS` names.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TextIO

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from testbed.base.units import format_seconds

VARIABLE: Final = "TESTBED_PROGRESS"
EVERY_S: Final = 1.0
LINES_EVERY_S: Final = 10.0
_LEAVE_S: Final = 1.0
_BYTES: Final = 512


class RunProgress(msgspec.Struct, frozen=True):
    """How far a run is.

    Attributes:
        state: what rank 0 is doing, in words.
        done: steps that are done.
        total: steps of the run; 0: not known yet.
        step_s: time of a step, mean over the last second or so.
        left_s: seconds that the steps to come will take; None: not known yet.
    """

    state: str
    done: int = 0
    total: int = 0
    step_s: float = 0.0
    left_s: float | None = None

    @property
    def words(self) -> str:
        """The step time and the remaining time; empty before the first step.

        Example:
            >>> RunProgress("computing step 5", 4, 10, 0.0125, 0.075).words
            '12.5 ms a step, about 75 ms left'
        """
        if not self.done:
            return ""
        left = "" if not self.left_s else f", about {format_seconds(self.left_s)} left"
        return f"{format_seconds(self.step_s)} a step{left}"

    @property
    def line(self) -> str:
        """All of it.

        Example:
            >>> RunProgress("computing step 5", 4, 10, 0.0125, 0.075).line
            'computing step 5; 4 of 10 steps done, 12.5 ms a step, about 75 ms left'
        """
        steps = f"; {self.done} of {self.total} steps done, {self.words}" if self.done else ""
        return f"{self.state}{steps}"


def write_progress(path: Path, progress: RunProgress) -> bool:
    """Put it into a file that is there; False where none is, as on a host of its own.

    Args:
        path: of the file.
        progress: what is told; its words are cut to fit a block of fixed size.
    """
    short = msgspec.structs.replace(progress, state=progress.state[:100])
    with contextlib.suppress(FileNotFoundError), path.open("r+b", buffering=0) as file:
        file.write(msgspec.json.encode(short).ljust(_BYTES)[:_BYTES])
        return True
    return False


def read_progress(path: Path) -> RunProgress | None:
    """What was written there last; None before the first time."""
    with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
        return msgspec.json.decode(path.read_bytes(), type=RunProgress)
    return None


@contextlib.contextmanager
def again_and_again(tell: Callable[[], object], every_s: float) -> Iterator[None]:
    """Inside the block, `tell` is called every so many seconds by a thread of its own.

    The block's end does not wait long for one that writes to a stream which takes nothing any more.
    """
    over = threading.Event()

    def body() -> None:
        while not over.wait(every_s):
            tell()

    thread = threading.Thread(target=body, name="telling", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_LEAVE_S)


class _PlainCursor(Console):
    """Never hides the cursor, so that however a process ends the terminal is in order."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


def bar(out: TextIO, *, before: tuple[str, ...] = ()) -> Progress:
    """A bar at a terminal that draws itself when it is told to (`refresh`) alone.

    Args:
        out: the terminal.
        before: fields of its tasks whose text stands between the bar and the description.
    """
    texts = [TextColumn(f"{{task.fields[{name}]}}", markup=False) for name in before]
    return Progress(
        *(MofNCompleteColumn(), BarColumn(bar_width=20), *texts),
        TextColumn("{task.description}", markup=False),
        console=_PlainCursor(file=out),
        auto_refresh=False,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # else it would go to the terminal, not to its file
    )


@contextlib.contextmanager
def run_bar(now: Callable[[], RunProgress | None], out: TextIO) -> Iterator[None]:
    """Inside the block, a bar for one run, drawn once a second and gone in the end.

    Args:
        now: how far the run is; None: nothing known yet.
        out: a terminal.
    """
    with bar(out, before=("words",)) as shown:
        task = shown.add_task("starting", total=None, words="")

        def draw() -> None:
            told = now()
            if told is not None:
                shown.update(task, total=told.total or None, completed=told.done)
                between = 0 < told.done < told.total
                shown.update(task, description="" if between else told.state, words=told.words)
            shown.refresh()

        with again_and_again(draw, EVERY_S):
            yield
