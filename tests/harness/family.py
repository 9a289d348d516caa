"""The processes below this one, and whose they are."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil

from testbed.forking import KEEPER

GONE = (FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess)


def descendants(owned: frozenset[int] = frozenset()) -> dict[int, str]:
    """Those of this process with their command lines, without `owned` and what belongs to these.

    A child that ends during the look can hide another.
    """
    found: dict[int, str] = {}
    parents = [os.getpid()]
    while parents:
        for pid in children_of(parents.pop()) - owned - found.keys():
            line = line_of(pid)
            if not (line.startswith(KEEPER) and belongs(int(line.split()[1]), owned)):
                found[pid] = line
                parents.append(pid)
    return found


def belongs(pid: int, owners: frozenset[int]) -> bool:
    """Whether a process is one of these, below one, or was forked for a stub that is."""
    while pid > 1 and pid not in owners:
        line = line_of(pid)
        pid = int(line.split()[1]) if line.startswith(KEEPER) else parent_of(pid)
    return pid in owners


def children_of(pid: int) -> set[int]:
    """As the kernel lists them for each thread, a hundredth of a look at all processes."""
    found: set[int] = set()
    with contextlib.suppress(*GONE):
        if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):  # an option of the kernel
            return {child.pid for child in psutil.Process(pid).children()}
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(*GONE):
                listed = Path(f"/proc/{pid}/task/{thread}/children").read_text()
                found.update(map(int, listed.split()))
    return found


def parent_of(pid: int) -> int:
    """The parent of a process; 0 if it has ended."""
    with contextlib.suppress(*GONE):
        return psutil.Process(pid).ppid()
    return 0


def line_of(pid: int) -> str:
    """The command line of a process; empty if it has ended."""
    with contextlib.suppress(*GONE):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0")
        return words.replace(b"\0", b" ").decode(errors="replace")
    return ""
