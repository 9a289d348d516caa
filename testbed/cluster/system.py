"""What is read from the machine and changed there: namespaces, commands, kernel features."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import stat
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

from testbed.base.errors import RunFailed, Unavailable, UsageError

# Names that hold the owner of a namespace, so that leftovers of an owner that ended can be found.
#
#     testbed-<pid>-<start of that process>-<part>
#
# A pid alone is used again some time; a pid with the time at which its process started is not.

PREFIX = "testbed-"
_START_FIELD = 19  # of /proc/PID/stat, counted behind the name's closing bracket


def process_start(pid: int) -> str | None:
    """When a process started, in the kernel's ticks since boot; None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else fields[_START_FIELD]


def own_prefix(number: int = 0) -> str:
    """The prefix of this process's names; clusters of one process differ by their number."""
    pid = os.getpid()
    return f"{PREFIX}{pid}-{process_start(pid)}-{number}"


def abandoned(
    names: Iterable[str], start_of: Callable[[int], str | None] = process_start
) -> list[str]:
    """Those of our names whose owner has ended; names of another form are left alone.

    Example:
        >>> abandoned(["testbed-7-100-0n1", "testbed-8-200-0n1", "vpn"], {7: "100", 8: "9"}.get)
        ['testbed-8-200-0n1']
    """
    found = []
    for name in names:
        match = re.match(rf"{PREFIX}(\d+)-(\d+)-", name)
        if match is not None and start_of(int(match[1])) != match[2]:
            found.append(name)
    return found


NETNS_FOLDER = Path("/run/netns")
COMMAND_S = 30.0
PROBE = f"{PREFIX}probe"


def call(*words: str) -> str:
    """Run a command of the system; what it printed.

    Raises:
        RunFailed: it failed; names it and quotes its output.
    """
    done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    if done.returncode != 0:
        raise RunFailed(f"`{' '.join(words)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def refusal(*words: str) -> str:
    """The error of a command that starts another, where it is not permitted; empty if it is."""
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
    """End all processes in a namespace of ours and remove it; no error if it is gone."""
    listed = subprocess.run(
        ("ip", "netns", "pids", name), capture_output=True, text=True, timeout=COMMAND_S
    )
    for pid in listed.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(("ip", "netns", "delete", name), capture_output=True, timeout=COMMAND_S)


def remove_leftovers() -> list[str]:
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
    """Whether it is this user's folder; another cluster may be removing its own meanwhile."""
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
    """Whether this kernel can delay and drop packets."""
    return _has_qdisc(namespace, "netem", "delay", "1ms")


def has_htb(namespace: str) -> bool:
    """Whether this kernel has the shaper that leaves no free burst."""
    return _has_qdisc(namespace, "htb", "default", "1")


def _has_qdisc(namespace: str, *qdisc: str) -> bool:
    """Tried on a namespace's loopback."""
    words = ("tc", "-n", namespace, "qdisc")
    tried = subprocess.run(
        (*words, "add", "dev", "lo", "root", *qdisc), capture_output=True, timeout=COMMAND_S
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


# TCP settings of an emulated node; pure.

SEND_WINDOW_S = 1e-3
LEAST_SEND_WINDOW_BYTES = 1 << 16


def send_window_bytes(kernel_bps: float, round_trip_s: float = 0.0) -> int:
    """Bytes that one connection may have under way and in queues.

        W = R / 8 (1 ms + 3 l),   R bit/s in the kernel, l the latency of one way there

    What a link carries in a millisecond: senders are never slowed down by loss here, so without a
    bound each would fill the queues with megabytes, connections would share a link in proportion to
    what they queued, and an urgent message would wait behind all of it. What is in flight because
    of the latency (bandwidth times round trip) is added, or no connection would fill its link, and
    half as much, for a sender that waits is woken when a third of the window is free.

    Args:
        kernel_bps: the link's rate.
        round_trip_s: 2 l, where packets are delayed.

    Example:
        >>> send_window_bytes(1e9), send_window_bytes(1e6), send_window_bytes(1e9, 0.02)
        (125000, 65536, 3875000)
    """
    return max(
        LEAST_SEND_WINDOW_BYTES, round(kernel_bps / 8 * (SEND_WINDOW_S + 1.5 * round_trip_s))
    )


def tcp_settings(kernel_bps: float, round_trip_s: float = 0.0) -> dict[str, str]:
    """Path below `/proc/sys/net` -> value, for a node whose link has this rate.

    `reno` is the one congestion control that a namespace may always choose; on a network without
    loss its window only grows. Slow start after a pause (for computing) is switched off.
    """
    window = send_window_bytes(kernel_bps, round_trip_s)
    return {
        "ipv4/tcp_congestion_control": "reno",
        "ipv4/tcp_slow_start_after_idle": "0",
        "ipv4/tcp_wmem": f"4096 {LEAST_SEND_WINDOW_BYTES} {window}",
    }


# Whether this process may make namespaces, and how: as root, or in a user namespace of its own.

TOOLS = ("ip", "tc", "unshare", "mount", "hostname")
IN_USER_NAMESPACE = "TESTBED_USER_NAMESPACE"

Way = Literal["here", "user namespace"]


def find_way(environment: Mapping[str, str] = os.environ) -> Way:
    """How a cluster can be made here.

    Raises:
        Unavailable: not at all; says why and what to do.
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
    """Why no cluster can be made here; None if one can."""
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
    """The error of `unshare` where it is not permitted; empty if it is."""
    return refusal("unshare", *options)


def _unavailable(reason: str, remedy: str) -> Unavailable:
    return Unavailable("emulated", "cluster", reason, remedy)


# Keeps idle cores from halting, so that no message waits until a core resumes.

REQUESTS: Final = Path("/dev/cpu_dma_latency")
YES: Final = "yes"
NOT_ASKED: Final = "no: awake=no"


@contextlib.contextmanager
def idle_polling(asked: bool = True, requests: Path = REQUESTS) -> Iterator[str]:
    """Inside the block idle cores poll instead of halting; `yes`, or why they do not.

    All nodes of an emulated cluster share the cores of one machine, which become idle and busy
    thousands of times a second. In a virtual machine a core that halts goes back to the host, and
    the time until the host resumes it is added to every message that arrives meanwhile (as steal
    time). A core that polls still counts as idle and yields at once. The kernel drops the request
    when the process that holds it ends, however it ends.

    Args:
        asked: False = idle cores halt as they always do.
        requests: the kernel's file for requests of a longest wake-up latency; only root may write.

    Example:
        >>> with idle_polling(requests=Path("/nonexistent/requests")) as awake:
        ...     awake
        'no: No such file or directory'
    """
    if not asked:
        yield NOT_ASKED
        return
    with contextlib.ExitStack() as stack:
        try:
            held = os.open(requests, os.O_WRONLY | os.O_CLOEXEC)
            stack.callback(os.close, held)
            os.write(held, struct.pack("=i", 0))  # microseconds
        except OSError as error:
            yield f"no: {error.strerror}"
        else:
            yield YES
