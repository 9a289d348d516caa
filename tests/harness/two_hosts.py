"""Two hosts on one machine: network namespaces with a cable between them and names of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SUBNET = "10.211.77"


@dataclass(frozen=True)
class TwoHosts:
    """What a command needs to run on both."""

    first: str
    hostfile: Path
    enter: Path
    cidr: str = f"{SUBNET}.0/24"

    def command(self, *words: str) -> list[str]:
        """The command, run on the first host."""
        return [str(self.enter), f"{SUBNET}.1", *words]


def lacking() -> str | None:
    """Why two hosts cannot be had here; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "the ip command is missing"
    return None


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[TwoHosts]:
    """Set up, and take down whatever happens."""
    names = [f"tbtest{os.getpid()}{side}" for side in "ab"]
    enter = folder / "enter"
    cases = "".join(
        f"{SUBNET}.{i + 1}) ns={name} host=node{i + 1};;\n" for i, name in enumerate(names)
    )
    # Called as ssh is: enter ADDRESS COMMAND...; every host has its name and its hosts entries.
    enter.write_text(
        "#!/bin/sh\n"
        f'target=$1; shift\ncase $target in\n{cases}*) echo "no host $target" >&2; exit 1;; esac\n'
        "exec ip netns exec $ns unshare --uts sh -c "
        '\'hostname "$0"; exec sh -c "$*"\' $host "$@"\n'
    )
    enter.chmod(0o755)
    hostfile = folder / "hosts"
    hostfile.write_text(f"{SUBNET}.1 slots=1\n{SUBNET}.2 slots=1\n")
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip(
            "link",
            "add",
            "tb0",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "tb0",
            "netns",
            names[1],
        )
        for i, name in enumerate(names):
            _ip("-n", name, "address", "add", f"{SUBNET}.{i + 1}/24", "dev", "tb0")
            _ip("-n", name, "link", "set", "tb0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield TwoHosts(f"{SUBNET}.1", hostfile, enter)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
