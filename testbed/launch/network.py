"""Which of this machine's addresses the job uses; servers and rank 0 bind to that one alone."""

from __future__ import annotations

import socket

import psutil

from testbed.errors import UsageError


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
