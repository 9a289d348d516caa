"""The slack of a thread's sleeps is asked for where Linux lets one."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from testbed.backends.mpi.backoff import SLACK_NS, sleep_exactly


def test_a_thread_sleeps_exactly_and_leaves_others_alone() -> None:
    mine = Path(f"/proc/{threading.get_native_id()}/timerslack_ns")
    if not os.access(mine, os.W_OK):
        pytest.skip("this system lets no thread set its timerslack_ns")
    before = mine.read_text()
    seen: list[str] = []

    def ask() -> None:
        if sleep_exactly():
            seen.append(Path(f"/proc/{threading.get_native_id()}/timerslack_ns").read_text())

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert seen == [f"{SLACK_NS}\n"]
    assert mine.read_text() == before
