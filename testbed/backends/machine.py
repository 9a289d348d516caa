"""What tells one machine from another, also where its ranks have host names of their own."""

from __future__ import annotations

from pathlib import Path


def machine_id(host: str) -> str:
    """This machine: its boot, or where Linux does not tell, the host's name.

    Nodes of an emulated cluster are hosts of one machine, and share its cores.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else host
