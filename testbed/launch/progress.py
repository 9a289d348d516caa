"""Tells on standard error what a long run is doing, so that nobody takes it for one that hangs."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TextIO

from testbed.base.units import format_seconds
from testbed.control.protocol import Control

EVERY_S = 10.0
LEAVE_S = 1.0
WORDS = "testbed: after"  # how such a line begins


@contextmanager
def progress_lines(
    state: Callable[[], str], out: TextIO, every_s: float = EVERY_S
) -> Iterator[None]:
    """Inside the block, a line every ten seconds with what `state` says then.

    A run that is over before says nothing. A thread of its own writes, which sleeps in between;
    the block's end does not wait for a stream that takes nothing any more.

    Args:
        state: what is being done, in words.
        out: where to.
        every_s: between two lines.

    Example:
        >>> import io
        >>> with progress_lines(lambda: "computing step 3", io.StringIO()):
        ...     pass
    """
    over, began_s = threading.Event(), time.perf_counter()

    def tell() -> None:
        while not over.wait(every_s):
            passed = format_seconds(time.perf_counter() - began_s)
            out.write(f"{WORDS} {passed}: {state()}\n")
            out.flush()

    thread = threading.Thread(target=tell, name="telling", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(LEAVE_S)


def progress_of(control: Control, rank: int, out: TextIO) -> AbstractContextManager[None]:
    """On rank 0 what it is doing, as the control plane knows it; nothing on the others."""
    if rank != 0:
        return nullcontext()
    return progress_lines(lambda: f"rank 0 is {control.state}", out)


# Python's search for garbage, kept away from what lives as long as the process.


def freeze_long_lived() -> None:
    """From now on a search for garbage does not look through what exists already.

    A full search goes through the hundreds of thousands of objects that the libraries made when
    they were imported. It holds the interpreter for 0.2 s, so that no message of this rank moves
    and all others wait for it: every rank once within the first steps, and again later.

    Example:
        >>> freeze_long_lived()
        >>> gc.get_freeze_count() > 1000
        True
        >>> gc.unfreeze()
    """
    gc.collect()
    gc.freeze()


@contextmanager
def gc_freeze() -> Iterator[None]:
    """Likewise, for as long as the context lasts; `freeze_long_lived` may be called inside."""
    freeze_long_lived()
    try:
        yield
    finally:
        gc.unfreeze()
