"""A command started on all ranks of an allocation, carried out by one of them.

`mpirun -n 8 testbed sweep ...` starts eight processes; a sweep is one. Rank 0 conducts it and
starts the cells' own jobs on the hosts of the allocation; the others wait without keeping a core
busy.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from testbed.launch.identity import Identity
from testbed.launch.join import START_S
from testbed.launch.rendezvous import meet
from testbed.launch.tree import base_environment

WEEK_S = 7 * 24 * 3600.0


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
def allocation(identity: Identity) -> Iterator[Allocation]:
    """The allocation for as long as the command runs.

    Ranks that do not conduct leave the block only when the conductor has left it.

    Raises:
        RankLost: the conductor (or another rank) was lost.
    """
    if identity.launcher == "alone" or identity.size in (None, 1):
        yield Allocation(True)
        return
    assert identity.size is not None
    control, _ = meet(
        identity, identity.size, os.environ, interface=None, deadline_s=60.0, start_s=START_S
    )
    names = control.all_gather("hosts", socket.gethostname().encode(), START_S)
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
    control.all_gather("over", b"", WEEK_S)
    control.close()
