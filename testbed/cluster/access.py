"""Whether this process may make namespaces, and how: as root, or in a user namespace of its own."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from typing import Literal

from testbed.base.errors import Unavailable
from testbed.cluster.system import NETNS_FOLDER, refusal, start_on_pid

TOOLS = ("ip", "tc", "unshare", "mount", "hostname")
IN_USER_NAMESPACE = "TESTBED_USER_NAMESPACE"

Way = Literal["here", "user namespace"]


def find_way(environment: Mapping[str, str] = os.environ) -> Way:
    """How a cluster can be had here.

    Raises:
        Unavailable: not at all; says why and what would help.
    """
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise _unavailable(f"no {', '.join(missing)} on PATH", "install iproute2 and util-linux")
    if os.geteuid() == 0:
        refused = _refusal("-n", "-m")
        if not refused or IN_USER_NAMESPACE in environment:
            return "here"
    refused = _refusal("-U", "-r", "-n", "-m")
    if not refused:
        return "user namespace"
    remedy = "run as root, or let users make namespaces (sysctl user.max_user_namespaces, "
    remedy += "kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns)"
    raise _unavailable(f"network namespaces are not allowed here ({refused})", remedy)


def lacking() -> str | None:
    """Why no cluster can be had here; None if one can."""
    try:
        find_way()
    except Unavailable as error:
        return str(error)
    return None


def enter_user_namespace(command: Sequence[str]) -> None:
    """Run the command in this process's place, as root of a user namespace; does not return."""
    folder = NETNS_FOLDER if NETNS_FOLDER.is_dir() else NETNS_FOLDER.parent
    # Names of network namespaces are files in /run, which belongs to the real root.
    prepare = f"mount -t tmpfs tmpfs {folder} && exec {shlex.join(command)}"
    variables = f"{IN_USER_NAMESPACE}=1"
    start_on_pid(["env", variables, "unshare", "-Urnm", "sh", "-c", prepare])


def _refusal(*options: str) -> str:
    """What `unshare` says when it may not; empty if it may."""
    return refusal("unshare", *options)


def _unavailable(reason: str, remedy: str) -> Unavailable:
    return Unavailable("emulated", "cluster", reason, remedy)
