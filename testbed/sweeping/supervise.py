"""Stands between a sweep and one cell, so that nothing of the cell outlives either of them.

    python -m testbed.sweeping.supervise GRACE_S COMMAND...

The cell runs in a session of its own. The supervisor ends all of its processes, wherever in the
process tree they hang, once the cell has ended or standard input closes, which it does when the
sweep wants the cell to end and also when the sweep itself was killed. What a fork server forked
for the cell is ended by its keepers; the supervisor waits for them. The exit status is the cell's
(128 + signal if a signal ended it).
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import threading
from types import FrameType

import psutil

from testbed.forking import KEEPER, SUPERVISOR
from testbed.forking.process import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    end_descendants,
    prctl,
)


def supervise(command: list[str], grace_s: float) -> int:
    """Run a command until it ends or standard input closes; leave nothing of it behind.

    Args:
        command: program and arguments.
        grace_s: seconds between asking processes to end (SIGTERM) and ending them (SIGKILL).

    Returns:
        The command's exit status as a shell gives it.
    """
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # grandchildren whose parent dies become ours
    awake, wake = os.pipe()

    def stop(signum: int, frame: FrameType | None) -> None:
        os.write(wake, b"s")

    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, stop)
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        env={**os.environ, SUPERVISOR: str(os.getpid())},
        start_new_session=True,
        preexec_fn=_end_with_parent,  # no thread runs yet, so this is safe
    )

    def wait() -> None:
        child.wait()
        os.write(wake, b"e")

    threading.Thread(target=wait, daemon=True).start()
    with selectors.DefaultSelector() as selector:
        selector.register(awake, selectors.EVENT_READ)
        selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        selector.select()
    end_descendants(grace_s)
    while keepers := _keepers():
        psutil.wait_procs(keepers)
    code = child.wait()
    return code if code >= 0 else 128 - code


def _keepers() -> list[psutil.Process]:
    """The keepers of what was forked for the command: they hang below the fork server."""
    own = str(os.getpid())
    found = psutil.process_iter(["cmdline"])
    return [p for p in found if (p.info["cmdline"] or [])[:3:2] == [KEEPER, own]]


def _end_with_parent() -> None:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(supervise(sys.argv[2:], float(sys.argv[1])))
