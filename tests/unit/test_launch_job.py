"""A job of ranks: whoever asks for its end gets it, and whoever asks twice does not prevent it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from testbed.launch.job import Job, run_job
from testbed.launch.processes import Ending, Interrupted, SignalGate, interruptible, wait_all
from testbed.sweeping.run import _interruptible as sweep_interruptible

STUBBORN = """
import os, signal, sys, threading
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(os.path.join(sys.argv[1], str(os.getpid())), "w").close()
threading.Event().wait()
"""


class Heard:
    """A standard error that tells when something was written there."""

    def __init__(self) -> None:
        self.text = ""
        self.said = threading.Event()

    def write(self, text: str) -> int:
        self.text += text
        self.said.set()
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""

    def isatty(self) -> bool:
        """It is no terminal."""
        return False


def test_who_asks_again_while_ranks_are_ended_does_not_save_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors, ready = Heard(), threading.Event()
    monkeypatch.setattr(sys, "stderr", errors)
    alive: list[bool] = []

    def ask_twice() -> None:
        while len(os.listdir(tmp_path)) < 2:
            ready.wait(0.02)
        os.kill(os.getpid(), signal.SIGINT)
        assert errors.said.wait(30)
        alive.extend(psutil.pid_exists(int(name)) for name in os.listdir(tmp_path))
        os.kill(os.getpid(), signal.SIGINT)

    asking = threading.Thread(target=ask_twice)
    asking.start()
    command = [sys.executable, "-c", STUBBORN, str(tmp_path)]
    over = run_job(Job(command, size=2, threads=1, needs_mpi=False), deadline_s=30)
    asking.join()
    assert (over.status, over.words) == (130, "")
    assert errors.text == "testbed: interrupted by SIGINT; ending all ranks\n"
    assert alive == [True, True]  # it was said before they were ended
    assert not any(psutil.pid_exists(int(name)) for name in os.listdir(tmp_path))


@pytest.mark.parametrize(("window_s", "status", "culprit"), [(30.0, -9, 0), (0.0, 1, 1)])
def test_who_was_killed_is_told_though_who_lost_it_is_seen_to_end_first(
    window_s: float, status: int, culprit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("testbed.launch.processes.AT_ONCE_S", window_s)
    killed = subprocess.Popen(["sh", "-c", "read word; kill -9 $$"], stdin=subprocess.PIPE)
    assert killed.stdin is not None
    with killed.stdin as last_word, subprocess.Popen(["sh", "-c", "exit 1"]) as loser:
        loser.wait()
        seen = loser.poll

        def seen_first() -> int | None:
            last_word.close()
            return seen()

        monkeypatch.setattr(loser, "poll", seen_first)
        ending = wait_all([killed, loser], grace_s=30)
    first = Ending(1, 1) if culprit == 0 else None
    assert ending == Ending(status, culprit, first)


@pytest.mark.parametrize(("code", "status"), [(0, 0), (1, 1), (2, 2), (7, 1)])
def test_what_a_shell_is_told(code: int, status: int) -> None:
    command = [sys.executable, "-c", f"import sys; sys.exit({code})"]
    over = run_job(Job(command, size=1, threads=1, needs_mpi=False), deadline_s=30)
    assert over.status == status
    assert (f"exited with status {code}" in over.words) == (code != 0)


def test_what_ranks_of_the_testbed_say_is_kept() -> None:
    words = "testbed: rank 0: it is broken"
    command = [sys.executable, "-c", f"import sys; sys.exit({words!r})"]
    over = run_job(Job(command, size=1, threads=1, needs_mpi=False), deadline_s=30)
    assert over.said == (words,)


def test_a_signal_is_heard_at_the_next_chance_and_once() -> None:
    with interruptible() as ears:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupted, match="SIGTERM"), ears.open():
            raise AssertionError("nothing may begin any more")
        os.kill(os.getpid(), signal.SIGINT)
        with ears.open():
            os.kill(os.getpid(), signal.SIGINT)
        assert ears.asked == signal.SIGTERM


@pytest.mark.parametrize("gate", [interruptible, sweep_interruptible])
def test_what_nohup_has_ignored_stays_ignored(gate: Callable[[], Any]) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with gate():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_IGN, signal.SIG_DFL)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_handlers_are_what_they_were() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interruptible() as ears:
        assert signal.getsignal(signal.SIGINT) == ears.hear
    assert signal.getsignal(signal.SIGINT) == before
    assert SignalGate().asked is None
