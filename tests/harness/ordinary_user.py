"""Words in front of a command that make an ordinary user run it, whoever runs the tests."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

HARNESS = Path(__file__).parent
PROJECT = HARNESS.parents[1]
NOBODY = 65534

# A user namespace counts those inside it; one inside it uses up the count, and is no root's.
REFUSED = (
    *("unshare", "-Ur", "sh", "-c"),
    "echo 1 > /proc/sys/user/max_user_namespaces && "
    'exec unshare -U --map-user=65534 --map-group=65534 "$@"',
    "sh",
)


def as_ordinary_user(home: Path) -> tuple[str, ...]:
    """Nobody where root runs the tests, else the user who does.

    Args:
        home: a folder that becomes the user's own.
    """
    variables = ("env", f"HOME={home}", f"TMPDIR={home}")
    if os.geteuid() != 0:
        return variables
    os.chown(home, NOBODY, NOBODY)
    needed = [Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), PROJECT, home]
    hidden = sorted({folder for path in needed for folder in closed_above(path)})
    below = [path for path in needed if any(path.is_relative_to(folder) for folder in hidden)]
    script = ("sh", str(HARNESS / "as_nobody.sh"), " ".join(map(str, hidden)))
    return (
        *("unshare", "-m", "--propagation", "private", *script, " ".join(map(str, below))),
        *variables,
    )


def closed_above(path: Path) -> list[Path]:
    """The topmost folder on the way to a path that others may not enter, if there is one."""
    ways = [path, *path.parents][::-1]
    return [folder for folder in ways if not folder.stat().st_mode & stat.S_IXOTH][:1]
