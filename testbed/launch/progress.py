"""Tells on standard error what a long run is doing, so that nobody takes it for one that hangs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TextIO

from testbed.base.units import format_seconds
from testbed.control.protocol import Control
from testbed.records.progress import (
    EVERY_S,
    LINES_EVERY_S,
    VARIABLE,
    RunProgress,
    again_and_again,
    run_bar,
    write_progress,
)

WORDS = "testbed: after"  # how such a line begins


def progress_lines(
    state: Callable[[], str], out: TextIO, every_s: float = LINES_EVERY_S
) -> AbstractContextManager[None]:
    """Inside the block, a line every ten seconds with what `state` says then.

    A run that is over before says nothing.

    Args:
        state: what is being done, in words.
        out: where to.
        every_s: between two lines.

    Example:
        >>> import io
        >>> with progress_lines(lambda: "computing step 3", io.StringIO()):
        ...     pass
    """
    began_s = time.perf_counter()

    def tell() -> None:
        passed = format_seconds(time.perf_counter() - began_s)
        out.write(f"{WORDS} {passed}: {state()}\n")
        out.flush()

    return again_and_again(tell, every_s)


def progress_of(
    control: Control,
    rank: int,
    out: TextIO,
    steps: Callable[[str], RunProgress] | None = None,
    *,
    alone: bool = False,
    quiet: bool = False,
) -> AbstractContextManager[None]:
    """On rank 0 what it is doing, as the control plane knows it; nothing on the others.

    Where whoever started it asked for a file (`TESTBED_PROGRESS`), it tells there, and else on the
    stream: a bar at a terminal, plain lines elsewhere.

    Args:
        control: of the job.
        rank: this one.
        out: the stream.
        steps: how far training is, from what it does in words; None: there are no steps.
        alone: no launcher stands between this process and the stream.
        quiet: nothing goes to the stream.
    """
    if rank != 0:
        return nullcontext()

    def now() -> RunProgress:
        state = control.state
        return RunProgress(state) if steps is None else steps(state)

    path = Path(os.environ.get(VARIABLE, ""))
    if path.name and write_progress(path, now()):

        def tell() -> None:
            write_progress(path, now())

        return again_and_again(tell, EVERY_S)
    if quiet:
        return nullcontext()
    if alone and out.isatty():
        return run_bar(now, out)
    return progress_lines(lambda: f"rank 0 is {now().line}", out)
