"""Something measured on one thread while this one does what it does in training."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def beside(load: Callable[[], object], measure: Callable[[], T]) -> T:
    """What `measure` returns on a thread of its own, while `load` is repeated on this one.

    A message that a busy host sends takes longer than on an idle one: threads wait for a core and
    for the interpreter. The load that is under way when the measurement ends is finished first.

    Raises:
        BaseException: what either of them raised; after `load` has, `measure` is waited for.

    Example:
        >>> done = []
        >>> beside(lambda: done.append("load"), lambda: "measured")
        'measured'
        >>> "load" in done
        True
    """
    with ThreadPoolExecutor(1, thread_name_prefix="measuring") as pool:
        measured = pool.submit(measure)
        load()
        while not measured.done():
            load()
        return measured.result()
