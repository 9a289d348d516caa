"""Something measured on one thread while this one does what it does in training."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")


def beside(load: Callable[[], object], measure: Callable[[], T], every_s: float = 0.0) -> T:
    """What `measure` returns on a thread of its own, while `load` is repeated on this one.

    A message that a busy host sends takes longer than on an idle one: threads wait for a core and
    for the interpreter. The load that is under way when the measurement ends is finished first.

    Args:
        load: what this thread does.
        measure: what is measured meanwhile.
        every_s: from the beginning of one load to that of the next, at least: where messages take
            longer than what a step computes, the host is idle for the rest of the step.

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
        while True:
            began_s = time.perf_counter()
            load()
            wait([measured], max(0.0, began_s + every_s - time.perf_counter()))
            if measured.done():
                break
        return measured.result()
