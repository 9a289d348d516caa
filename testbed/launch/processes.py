"""Processes that this one starts, and the promise that none of them outlives it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import TextIO

import psutil

from testbed.launch.identity import identify

PR_SET_PDEATHSIG = 1
ASKING_TO_END = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AT_ONCE_S = 1.0  # endings so near each other are told in no order


def die_with_parent() -> None:
    """Ask Linux to end this process when the one that started it ends, even by kill -9."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    pass_fds: Sequence[int] = (),
    errors: int | None = None,
    output: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start a child that ends when this process does; it leads a session of its own.

    Args:
        command: program and arguments.
        environment: all of the child's variables.
        pass_fds: descriptors that it inherits.
        errors: where its standard error goes; None = where this process's goes.
        output: likewise its standard output.
    """
    return subprocess.Popen(
        list(command),
        env=dict(environment),
        pass_fds=tuple(pass_fds),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )


class Interrupted(Exception):
    """A signal asked this process to end."""

    def __init__(self, signum: int) -> None:
        self.status = 128 + signum
        super().__init__(f"interrupted by {signal.Signals(signum).name}")


class SignalGate:
    """Hears Ctrl-C, SIGTERM and SIGHUP, and raises where it is safe to: inside `open`.

    The first signal counts. Whoever asks again, while children are being ended for the first, is
    heard no more; who asks while they are started or ended is heard at the next `open`.
    """

    def __init__(self) -> None:
        self.asked: int | None = None
        self._open = self._raised = False

    def hear(self, signum: int, frame: FrameType | None) -> None:
        """The handler."""
        if self.asked is None:
            self.asked = signum
        if self._open:
            self._raise()

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Inside, the first signal raises.

        Raises:
            Interrupted: also at the beginning, for a signal that came before.
        """
        self._open = True
        try:
            if self.asked is not None:
                self._raise()
            yield
        finally:
            self._open = False

    def _raise(self) -> None:
        if not self._raised and self.asked is not None:
            self._raised = True
            raise Interrupted(self.asked)


@contextlib.contextmanager
def interruptible() -> Iterator[SignalGate]:
    """Inside, signals that ask this process to end are heard by the ears that it gives."""
    ears, before = SignalGate(), {}
    try:
        for signum in ASKING_TO_END:
            if signum == signal.SIGHUP and signal.getsignal(signum) is signal.SIG_IGN:
                continue  # under nohup
            before[signum] = signal.signal(signum, ears.hear)
        yield ears
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@dataclass(frozen=True)
class Ending:
    """How the children ended: the first that failed, or status 0.

    Of several that failed at once it is one that a signal ended: who merely lost it ends a moment
    later, by itself, and may be seen to end first; that one is `first` then.
    """

    status: int
    culprit: int | None = None
    first: Ending | None = None


def wait_all(
    children: Sequence[subprocess.Popen[bytes]],
    grace_s: float,
    failing: Callable[[], bool] = lambda: False,
) -> Ending:
    """Wait for all; once one fails the rest have `grace_s` to end by themselves, then are ended.

    Survivors of a loss write what they were waiting for before they end, hence the grace.

    Args:
        children: processes that were started together.
        grace_s: how long they have once one has failed.
        failing: whether something below a child has failed already; a launcher may wait for ever
            for a host that is cut off.
    """
    first_s, limit_s = 0.0, float("inf")
    failed: list[Ending] = []
    waiting = dict(enumerate(children))
    while waiting:
        over = {i: child.returncode for i, child in waiting.items() if child.poll() is not None}
        waiting = {i: child for i, child in waiting.items() if i not in over}
        now_s = time.monotonic()
        first_s = first_s if failed else now_s
        if now_s - first_s <= AT_ONCE_S:
            failed += [Ending(status, i) for i, status in over.items() if status != 0]
        if failed or failing():
            limit_s = min(limit_s, now_s + grace_s)
        if waiting and now_s > limit_s:
            end_all(list(waiting.values()))
            failed = failed or [Ending(c.wait() or 1, i) for i, c in waiting.items()]
            break
        if waiting:
            _wait_any(list(waiting.values()), 0.2)
    if not failed:
        return Ending(0)
    # A shell and a fork server say 128 + the signal's number.
    told = min(failed, key=lambda one: not (one.status < 0 or 128 < one.status <= 192))
    return told if told is failed[0] else replace(told, first=failed[0])


def _wait_any(children: list[subprocess.Popen[bytes]], timeout_s: float) -> None:
    """Until one has ended, or so long; where the system cannot watch all, until the first has."""
    with contextlib.ExitStack() as opened, selectors.DefaultSelector() as selector:
        try:
            for child in children:
                watched = os.pidfd_open(child.pid)
                opened.callback(os.close, watched)
                selector.register(watched, selectors.EVENT_READ)
        except (AttributeError, OSError):  # not Linux; an old kernel; a container that forbids it
            with contextlib.suppress(subprocess.TimeoutExpired):
                children[0].wait(timeout_s)
        else:
            selector.select(timeout_s)


def end_all(children: Sequence[subprocess.Popen[bytes]], grace_s: float = 2.0) -> None:
    """End children and everything below them: first asked, then killed."""
    family = [p for child in children for p in _family(child.pid)]
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(family, timeout=grace_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)
            process.kill()
    for child in children:
        child.wait()


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


class Tee:
    """Passes on what children write, and remembers what the testbed itself said there.

    Args:
        to: this process's standard error, or output.
    """

    def __init__(self, to: Callable[[], TextIO] = lambda: sys.stderr) -> None:
        self._to = to
        self._read_fd, self.write_fd = os.pipe()
        self._said: deque[str] = deque(maxlen=40)
        self._thread = threading.Thread(target=self._run, name="stderr", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with os.fdopen(self._read_fd, "rb") as lines:
            for line in lines:
                with contextlib.suppress(OSError):  # nobody reads it any more; ranks write on
                    self._pass_on(line)
                if re.match(rb"testbed: (rank|[A-Z]\w+: )", line):
                    self._said.append(line.decode(errors="replace").rstrip())

    def _pass_on(self, line: bytes) -> None:
        out = self._to()
        if out.isatty():  # a bar may stand there, which a text goes above
            out.write(line.decode(errors="replace"))
        else:
            out.buffer.write(line)
        out.flush()

    def heard(self) -> bool:
        """Whether a rank said why it ends: one that ends well says nothing."""
        return bool(self._said)

    def close(self, timeout_s: float) -> list[str]:
        """What was said; call it when the children have ended."""
        os.close(self.write_fd)
        self._thread.join(timeout_s)
        return list(self._said)


def status_of(returncode: int) -> str:
    """A return code in words.

    Example:
        >>> status_of(-9), status_of(1)
        ('was ended by SIGKILL', 'exited with status 1')
    """
    if returncode < 0:
        return f"was ended by {signal.Signals(-returncode).name}"
    return f"exited with status {returncode}"


def own_command(*arguments: str) -> list[str]:
    """The command line that runs this very installation of the testbed."""
    return [sys.executable, "-m", "testbed", *arguments]


def base_environment() -> dict[str, str]:
    """This process's variables for a job of its own: without those of a launcher that started it.

    Without a launcher they are left as they are: a user's MCA settings are the user's, and under
    one those that choose the network. A step of Slurm that is started within a step shares its
    processors; it would wait for them for ever.
    """
    if identify(os.environ).launcher == "alone":
        return {**_within_step(), **os.environ}
    prefixes = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "TESTBED_", "TORCHELASTIC_", "SLURM_STEP")
    mpi = tuple(f"OMPI_MCA_{part}" for part in ("btl_tcp_", "pml", "mtl", "oob_tcp_if_"))
    networks = (*mpi, "PRTE_MCA_prte_if_", "PMIX_MCA_ptl_tcp_if_")
    single = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    return _within_step() | {
        name: value
        for name, value in os.environ.items()
        if name.startswith(networks)
        or name == "OMPI_MCA_btl"
        or not (name.startswith(prefixes) or name in single)
    }


def _within_step() -> dict[str, str]:
    return {"SLURM_OVERLAP": "1"} if "SLURM_STEP_ID" in os.environ else {}
