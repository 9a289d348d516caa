"""A command started on all ranks of an allocation, carried out by one of them.

`mpirun -n 8 testbed sweep ...` starts eight processes; a sweep is one. Rank 0 conducts it and
starts the cells' own jobs on the hosts of the allocation; the others wait without keeping a core
busy.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from testbed.base.config import START_S
from testbed.base.errors import RunFailed
from testbed.cluster.emulate import emulated, link_changes
from testbed.cluster.spec import parse_cluster
from testbed.cluster.system import enter_user_namespace, find_way
from testbed.control.protocol import UNTIL_LOST_S
from testbed.launch import processes
from testbed.launch.identity import Identity
from testbed.launch.mpirun import without_queue
from testbed.launch.processes import base_environment
from testbed.launch.rendezvous import meet


@dataclass(frozen=True)
class Allocation:
    """What a launcher gave to the command.

    Attributes:
        conducts: this process carries the command out.
        hosts: (host, slots) of several hosts; empty = everything is on this one.
        environment: variables for jobs started from here; None = as they are.
    """

    conducts: bool
    hosts: tuple[tuple[str, int], ...] = ()
    environment: Mapping[str, str] | None = None


@contextlib.contextmanager
def allocation(identity: Identity, interface: str | None = None) -> Iterator[Allocation]:
    """The allocation for as long as the command runs.

    Ranks that do not conduct leave the block only when the conductor has left it.

    Args:
        identity: of this process.
        interface: that the ranks meet on; None: decided.

    Raises:
        RankLost: the conductor (or another rank) was lost.
    """
    if identity.launcher == "alone" or identity.size in (None, 1):
        # Jobs started from here are not the launcher's, also where it started this process alone.
        yield Allocation(True, environment=base_environment())
        return
    assert identity.size is not None
    control, _ = meet(
        identity, identity.size, os.environ, interface=interface, deadline_s=60.0, start_s=START_S
    )
    names = control.all_gather("hosts", socket.gethostname().encode(), 2 * START_S)
    counted = Counter(name.decode() for name in names)
    hosts = tuple(counted.items()) if len(counted) > 1 else ()
    if identity.rank == 0:
        try:
            yield Allocation(True, hosts, base_environment())
        finally:
            control.all_gather("over", b"", START_S)
            control.close()
        return
    yield Allocation(False)
    control.all_gather("over", b"", UNTIL_LOST_S)
    control.close()


# Runs a command of its own on the first node of an emulated cluster that lasts as long as it.

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
        again = processes.own_command("cluster", "--spec", spec.text(), "--", *command)
        enter_user_namespace(again)
    children: list[subprocess.Popen[bytes]] = []
    ending = processes.Ending(0)
    unchanged: RunFailed | None = None
    with processes.interruptible() as ears, contextlib.ExitStack() as stack:
        try:
            with ears.open():
                cluster = stack.enter_context(emulated(spec))
                # A launcher inside needs seconds to end a rank that is stopped, and to clean up.
                stack.callback(processes.end_all, children, GRACE_S)
                base = without_queue(processes.base_environment())
                environment = cluster.environment(with_own_programs(base))
                children.append(processes.start(cluster.command(command), environment))
                failure = stack.enter_context(link_changes(cluster))
                ending = processes.wait_all(children, grace_s, lambda: failure() is not None)
                unchanged = failure()
        except processes.Interrupted as error:
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
