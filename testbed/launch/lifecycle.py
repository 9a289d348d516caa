"""A rank from joining a job to leaving it: its share of the cores, its signals, its errors."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn, TypeVar

import torch

from testbed.backends.protocol import Group
from testbed.base.errors import RankLost, TestbedError, UsageError, tell
from testbed.cluster.facts import find_facts
from testbed.control.protocol import Control, Loss
from testbed.launch.host import check_threads, own_threads

T = TypeVar("T")


def as_member(rank: int, group: Group, live: Callable[[], T]) -> T:
    """Do what a member does between joining and leaving. Never returns after a failure.

    Args:
        rank: the member's number, for messages.
        group: the job that it joined; its control plane is closed in the end.
        live: what the member does there; whatever it raises is told to the others.
    """
    who = f"rank {rank} (host {group.host}, pid {os.getpid()})"
    _speak_when_ended(who, group.control)
    end_soon_after_loss(who, group)
    try:
        with gc_freeze():
            result = live()
        group.control.close()
    except BaseException as error:  # the others must hear of it, whatever it is
        _fail(who, group.control, error)
    return result


def end_soon_after_loss(who: str, group: Group) -> None:
    """Once a member is lost, end this process within the deadline, whatever it is busy with.

    The error usually reaches the main thread at its next wait; this is for ranks that compute,
    load or stand in a library call that a lost rank will never answer.
    """

    def end(loss: Loss) -> None:
        error = RankLost(loss.who, loss.why, f"this rank was {group.control.state}, and is ended")
        tell(f"testbed: {who}: RankLost: {error}\n")
        os._exit(1)

    def arm(loss: Loss) -> None:
        timer = threading.Timer(0.4 * group.deadline_s, end, (loss,))
        timer.daemon = True
        timer.start()

    group.control.on_loss(arm)


def share_cores(threads: int | None, local_size: int) -> None:
    """Give each rank of this host its share of the cores, unless told otherwise.

    Raises:
        UsageError: it was told more threads than there are cores.
    """
    check_threads(threads)
    given = os.environ.get("OMP_NUM_THREADS", "")
    default = int(given) if given.isdigit() else own_threads(local_size, find_facts())
    torch.set_num_threads(threads or default)
    # The communication thread needs the interpreter between two of the main thread's calls.
    sys.setswitchinterval(0.0005)


def place_device(device: str, local_rank: int) -> str:
    """`cuda` becomes the device of this local rank; ranks share devices when there are too few.

    It is the process's current one from then on, also where the user has named it.
    """
    count, placed = torch.cuda.device_count(), device
    if device == "cuda":
        placed = f"cuda:{local_rank % max(1, count)}"
    if count and placed.startswith("cuda"):
        torch.cuda.set_device(placed)
    return placed


def _speak_when_ended(who: str, control: Control) -> None:
    """A launcher that ends survivors does so by SIGTERM: say what was going on, then go."""

    def speak(signum: int, frame: FrameType | None) -> NoReturn:
        name = signal.Signals(signum).name
        loss = f"; {control.loss.who} is lost: {control.loss.why}" if control.loss else ""
        tell(f"testbed: {who}: ended by {name} while {control.state}{loss}\n")
        os._exit(128 + signum)

    signal.signal(signal.SIGTERM, speak)


def _fail(who: str, control: Control, error: BaseException) -> NoReturn:
    """Tell the others and end at once: a library that waits for a dead rank cannot be finalised."""
    if isinstance(error, TestbedError):
        words = f"{type(error).__name__}: {error}"
    elif isinstance(error, KeyboardInterrupt):
        words = "interrupted"
    else:
        words = f"{type(error).__name__}: {error}"
        tell("".join(traceback.format_exception(error)))
    control.report_failure(f"it failed while {control.state} with {words}")
    tell(f"testbed: {who}: {words}\n")
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(_status_of(error))


def _status_of(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return 130
    return 2 if isinstance(error, UsageError) else 1


# glibc's numbers of `mallopt`.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_MAPPED_BYTES = 1 << 20


def settle_allocator(*, returns_pages: bool) -> None:
    """Let glibc's allocator keep freed pages, or give them back at once; elsewhere nothing.

    Its own rules give large blocks back at every step, which then have to be mapped and cleared
    anew: a step of ResNet-50 takes up to twice as long. Where memory is limited each large block is
    a mapping of its own, so that nothing is retained and nothing lies in between.

    Args:
        returns_pages: large blocks go back to the system as soon as they are freed.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt") or not hasattr(libc, "gnu_get_libc_version"):
        return
    if returns_pages:
        libc.mallopt(_MMAP_THRESHOLD, _MAPPED_BYTES)
        libc.mallopt(_TRIM_THRESHOLD, _MAPPED_BYTES)
    else:
        libc.mallopt(_MMAP_MAX, 0)
        libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)


# Python's search for garbage, kept away from what lives as long as the process.


def freeze_long_lived() -> None:
    """From now on a search for garbage does not look through what exists already.

    A full search goes through the hundreds of thousands of objects that the libraries made when
    they were imported. It holds the interpreter for 0.2 s, so that no message of this rank moves
    and all others wait for it: every rank once within the first steps, and again later.

    Example:
        >>> freeze_long_lived()
        >>> gc.get_freeze_count() > 1000
        True
        >>> gc.unfreeze()
    """
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def gc_freeze() -> Iterator[None]:
    """Likewise, for as long as the context lasts; `freeze_long_lived` may be called inside."""
    freeze_long_lived()
    try:
        yield
    finally:
        gc.unfreeze()
