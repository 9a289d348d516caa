"""How long a thread waited for a core is read from the system."""

from __future__ import annotations

import os
import threading

import pytest

from testbed.training.measurement import read_awaited_s


@pytest.mark.skipif(
    read_awaited_s() is None, reason="this kernel has no /proc/thread-self/schedstat"
)
def test_a_thread_that_shares_a_core_waits_for_it() -> None:
    waited = []

    def compute() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        child = os.fork()
        if child == 0:  # computes on the same core until it is ended
            while True:
                pass
        before_s = read_awaited_s()
        assert before_s is not None
        now_s: float | None = before_s
        while now_s is not None and now_s < before_s + 0.01:  # the kernel takes turns
            now_s = read_awaited_s()
        os.kill(child, 9)
        os.waitpid(child, 0)
        waited.append(now_s)

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join(60)
    assert len(waited) == 1
    assert waited[0] is not None
