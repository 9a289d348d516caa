"""Opens the two backends; imported only when one of them is opened, because it loads MPI."""

from __future__ import annotations

from dataclasses import replace

from testbed.backends.mpi.backend import MpiBackend
from testbed.backends.mpi.library import LibraryCollectives
from testbed.backends.mpi.options import LibraryOptions, RingOptions
from testbed.backends.mpi.patience import Patience
from testbed.backends.mpi.ring_collectives import RingCollectives
from testbed.backends.mpi.two_level import flat_groups, groups_of
from testbed.backends.mpi.world import join
from testbed.backends.protocol import Group
from testbed.errors import UsageError


def open_ring(group: Group, options: RingOptions) -> MpiBackend:
    """Join the group and open `mpi-ring`; collective.

    Raises:
        UsageError: `levels=2` over hosts with different numbers of ranks.
    """
    joined = join(group)
    groups = (
        flat_groups(group.size)
        if options.levels == 1
        else groups_of(joined.hosts, options.group_size)
    )
    collectives = RingCollectives(
        joined.comms,
        options.segment_bytes,
        groups,
        options.fixed_switch_bytes,
        Patience(joined.manners),
    )
    settled = replace(options, switch_bytes=str(collectives.switch_bytes))
    return MpiBackend(group, joined, collectives, settled)


def open_library(group: Group, options: LibraryOptions) -> MpiBackend:
    """Join the group and open `mpi`; collective.

    Raises:
        UsageError: blocking calls on several channels, which would wait for each other.
    """
    if options.blocking and group.num_channels > 1:
        raise UsageError(
            f"blocking=1 was given with {group.num_channels} channels; expected one, because the "
            "ranks may block on different channels for ever; use channels=1 or blocking=0"
        )
    joined = join(group)
    return MpiBackend(group, joined, LibraryCollectives(joined.comms, options.blocking))
