"""Runs a command of its own on the first node of an emulated cluster that lasts as long as it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from testbed.cluster.access import enter_user_namespace, find_way
from testbed.cluster.emulate import emulated
from testbed.cluster.following import changing
from testbed.cluster.spec import parse_cluster
from testbed.errors import RunFailed
from testbed.launch import tree

GRACE_S = 10.0


def run_in_cluster(spec_text: str, command: Sequence[str], grace_s: float = 10.0) -> int:
    """Bring the cluster up, run the command on node 1, take the cluster down.

    An ordinary user's process is replaced by one in a user namespace that does the same.

    Args:
        spec_text: as `parse_cluster` reads it.
        command: program and arguments; finds the cluster by its environment.
        grace_s: how long others may go on once one process has failed.

    Returns:
        The command's exit status as a shell gives it.

    Raises:
        UsageError: the specification is wrong.
        Unavailable: no cluster can be had here; says why.
        RunFailed: a change of links that was asked for could not be made.
    """
    spec = parse_cluster(spec_text)
    if find_way() == "user namespace":
        again = tree.own_command("cluster", "--spec", spec.text(), "--", *command)
        enter_user_namespace(again)
    children: list[subprocess.Popen[bytes]] = []
    ending = tree.Ending(0)
    unchanged: RunFailed | None = None
    with tree.interruptible() as ears, contextlib.ExitStack() as stack:
        try:
            with ears.open():
                cluster = stack.enter_context(emulated(spec))
                # A launcher inside needs seconds to end a rank that is stopped, and to clean up.
                stack.callback(tree.end_all, children, GRACE_S)
                environment = cluster.environment(with_own_programs(tree.base_environment()))
                children.append(tree.start(cluster.command(command), environment))
                failure = stack.enter_context(changing(cluster))
                ending = tree.wait_all(children, grace_s, lambda: failure() is not None)
                unchanged = failure()
        except tree.Interrupted as error:
            sys.stderr.write(f"testbed: {error}; the cluster is taken down\n")
            sys.stderr.flush()
    if ears.asked is not None:
        return 128 + ears.asked
    if unchanged is not None:
        raise unchanged
    return ending.status if ending.status >= 0 else 128 - ending.status


def with_own_programs(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables with this Python's programs last on PATH: the packages' mpirun is found.

    Example:
        >>> with_own_programs({"PATH": "/usr/bin"})["PATH"].startswith("/usr/bin:")
        True
    """
    given = environment.get("PATH", os.defpath)
    return {**environment, "PATH": f"{given}{os.pathsep}{Path(sys.executable).parent}"}
