"""Names that tell whose a namespace is, so that what a dead owner left can be told from the rest.

    testbed-<pid>-<start of that process>-<part>

A pid alone comes back one day; with the time at which its process started it does not.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

PREFIX = "testbed-"
_START_FIELD = 19  # of /proc/PID/stat, counted behind the name's closing bracket


def process_start(pid: int) -> str | None:
    """When a process started, in the kernel's ticks since boot; None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else fields[_START_FIELD]


def own_prefix(number: int = 0) -> str:
    """The prefix of this process's names; clusters of one process differ by their number."""
    pid = os.getpid()
    return f"{PREFIX}{pid}-{process_start(pid)}-{number}"


def abandoned(
    names: Iterable[str], start_of: Callable[[int], str | None] = process_start
) -> list[str]:
    """Those of our names whose owner no longer lives; names of another form are nobody's concern.

    Example:
        >>> abandoned(["testbed-7-100-0n1", "testbed-8-200-0n1", "vpn"], {7: "100", 8: "9"}.get)
        ['testbed-8-200-0n1']
    """
    found = []
    for name in names:
        match = re.match(rf"{PREFIX}(\d+)-(\d+)-", name)
        if match is not None and start_of(int(match[1])) != match[2]:
            found.append(name)
    return found
