"""What of the machine is asked and changed: namespaces, commands, what the kernel can do."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from testbed.cluster.owner import PREFIX, abandoned
from testbed.errors import RunFailed, UsageError

NETNS_FOLDER = Path("/run/netns")
COMMAND_S = 30.0
PROBE = f"{PREFIX}probe"


def call(*words: str) -> str:
    """Run a command of the system; what it printed.

    Raises:
        RunFailed: it failed; says which and what it said.
    """
    done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    if done.returncode != 0:
        raise RunFailed(f"`{' '.join(words)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def refusal(*words: str) -> str:
    """What a command that starts another says when it may not; empty if it may."""
    try:
        tried = subprocess.run(
            (*words, "true"), capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
    except FileNotFoundError:
        return f"no {words[0]} on PATH"
    if tried.returncode == 0:
        return ""
    return tried.stderr.strip() or f"{words[0]} ends with status {tried.returncode}"


def add_namespace(name: str) -> None:
    """Make a named network namespace."""
    call("ip", "netns", "add", name)


def remove_namespace(name: str) -> None:
    """End whatever still runs in a namespace of ours, and take it away; fine if it is gone."""
    listed = subprocess.run(
        ("ip", "netns", "pids", name), capture_output=True, text=True, timeout=COMMAND_S
    )
    for pid in listed.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(("ip", "netns", "delete", name), capture_output=True, timeout=COMMAND_S)


def clean_up_after_the_dead() -> list[str]:
    """Remove namespaces and folders of clusters whose owner was killed; their names."""
    namespaces = os.listdir(NETNS_FOLDER) if NETNS_FOLDER.is_dir() else []
    dead = abandoned(namespaces)
    for name in dead:
        remove_namespace(name)
    root = Path(tempfile.gettempdir())
    folders = [path.name for path in root.glob(f"{PREFIX}*") if _is_own_folder(path)]
    for name in abandoned(folders):
        shutil.rmtree(root / name, ignore_errors=True)
    return dead


def _is_own_folder(path: Path) -> bool:
    """Whether it is this user's folder; another cluster may be taking its own away meanwhile."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def set_sysctl(namespace: str, key: str, value: str) -> None:
    """Set a namespace's own network setting; a kernel that refuses leaves it as it is."""
    script = 'echo "$1" > "$2"'
    subprocess.run(
        ("ip", "netns", "exec", namespace, "sh", "-c", script, "sh", value, f"/proc/sys/net/{key}"),
        capture_output=True,
        timeout=COMMAND_S,
    )


def sysctl(namespace: str, key: str) -> str:
    """What the setting is."""
    return " ".join(call("ip", "netns", "exec", namespace, "cat", f"/proc/sys/net/{key}").split())


def has_netem(namespace: str) -> bool:
    """Whether this kernel can delay and drop packets, tried on a namespace's loopback."""
    words = ("tc", "-n", namespace, "qdisc")
    tried = subprocess.run(
        (*words, "add", "dev", "lo", "root", "netem", "delay", "1ms"),
        capture_output=True,
        timeout=COMMAND_S,
    )
    if tried.returncode == 0:
        call(*words, "delete", "dev", "lo", "root")
    return tried.returncode == 0


def start_on_pid(words: Sequence[str]) -> None:
    """Become another program, in this very process."""
    try:
        os.execvp(words[0], list(words))
    except OSError as error:
        raise UsageError(f"{words[0]} cannot be run: {error.strerror}") from error
