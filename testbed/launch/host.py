"""Which of this machine's addresses the job uses; servers and rank 0 bind to that one alone."""

from __future__ import annotations

import os
import socket

import psutil

from testbed.base.errors import UsageError
from testbed.cluster.facts import Facts


def choose_address(interface: str | None, single_host: bool) -> str:
    """The IPv4 address to bind to and to tell the others.

    Args:
        interface: name of an interface (`eth0`) or an address of this machine; None = decide here.
        single_host: all members are on this machine, so nothing need leave it.

    Raises:
        UsageError: the interface does not exist here; lists those that do.
    """
    addresses = ipv4_addresses()
    if interface is not None:
        if interface in addresses:
            return addresses[interface]
        if interface in addresses.values():
            return interface
        known = ", ".join(f"{name} ({address})" for name, address in sorted(addresses.items()))
        raise UsageError(f"no interface {interface!r} on this machine; it has {known}")
    if single_host:
        return "127.0.0.1"
    outward = [a for a in addresses.values() if not a.startswith("127.")]
    by_name = _resolve(socket.gethostname())
    if by_name in outward:
        return by_name
    if not outward:
        raise UsageError(
            "this machine has no network interface but loopback, and the job spans several hosts; "
            "name the interface that joins them with --interface"
        )
    return outward[0]


def ipv4_addresses() -> dict[str, str]:
    """Interface name -> first IPv4 address, for interfaces that are up."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    return {
        name: entry.address
        for name, entries in psutil.net_if_addrs().items()
        if name in up
        for entry in reversed(entries)
        if entry.family == socket.AF_INET
    }


def _resolve(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return ""  # a name without an address is common in containers; the caller has other ways


# How many torch threads each rank of a machine has.


def usable_cores() -> int:
    """Cores that this process may use; all of the machine's where the system does not tell."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_of(size: int, facts: Facts | None = None, cores: int | None = None) -> int:
    """Threads of each of the ranks that are to be started here, so that they fit its cores.

    On a node of an emulated cluster that keeps to its cores only that node's ranks share them.

    Args:
        size: ranks on this machine, or on all nodes of the cluster.
        facts: of the cluster; None = there is none.
        cores: that this process may use; None = asked of the system.

    Example:
        >>> threads_of(4, cores=16), threads_of(8, cores=2)
        (4, 1)
    """
    sharers = _ranks_of_node(facts) or size
    return max(1, (usable_cores() if cores is None else cores) // sharers)


def own_threads(local_size: int, facts: Facts | None = None) -> int:
    """Threads of this rank, one of `local_size` that some launcher started on this host.

    It may have bound each rank to cores of its own, so that those that a rank has are its share.

    Example:
        >>> own_threads(10**6)
        1
    """
    if _ranks_of_node(facts):
        return threads_of(local_size, facts)
    return max(1, min(usable_cores(), (os.cpu_count() or 1) // local_size))


def check_threads(threads: int | None, cores: int | None = None) -> None:
    """Refuse more threads for one rank than the machine has cores: they would only take turns.

    Args:
        threads: as asked for; None = not.
        cores: of the machine; None = asked of the system.

    Raises:
        UsageError: there are more.
    """
    cores = (os.cpu_count() or 1) if cores is None else cores
    if threads is not None and threads > cores:
        raise UsageError(
            f"--threads is {threads} for each rank, and this machine has {cores} cores; give at "
            f"most {cores}, or leave it out: a rank then gets its share of the cores"
        )


def _ranks_of_node(facts: Facts | None) -> int:
    """Ranks that share a node's own cores; 0 where there are no such."""
    pinned = facts is not None and facts.record.get("cores") == "pinned"
    return int(facts.record["ranks_per_node"]) if facts is not None and pinned else 0
