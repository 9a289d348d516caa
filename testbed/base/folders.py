"""Folders of one process, gone after it however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def held_folder(where: Path, prefix: str, suffix: str) -> Iterator[Path]:
    """A new folder, gone after the block.

    Its owner holds a lock on it, which ends with the owner, be it by kill -9: folders of these
    names that nobody holds are removed first, if they are this user's. Process ids would not tell,
    for containers that share the place count their processes each for itself.

    Args:
        where: the folder that it is made in.
        prefix: of its name.
        suffix: of its name.

    Raises:
        OSError: there may be none here.

    Example:
        >>> with held_folder(Path("/tmp"), "testbed-", "-example") as folder:
        ...     folder.is_dir()
        True
        >>> folder.exists()
        False
    """
    for abandoned in where.glob(f"{prefix}*{suffix}"):
        _remove_if_nobody_holds(abandoned)
    own, lock = _make(where, prefix, suffix)
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)
        os.close(lock)


@contextlib.contextmanager
def held_folder_or_none(where: Path, prefix: str, suffix: str) -> Iterator[Path | None]:
    """`held_folder`, or None where there may be none: no such place, no right, no locks."""
    with contextlib.ExitStack() as held:
        own = None
        with contextlib.suppress(OSError):
            own = held.enter_context(held_folder(where, prefix, suffix))
        yield own


def _make(where: Path, prefix: str, suffix: str) -> tuple[Path, int]:
    """A new folder and the descriptor that holds its lock."""
    while True:
        own = Path(tempfile.mkdtemp(suffix, prefix, where))
        try:
            lock = _hold(own)
        except OSError as error:
            with contextlib.suppress(OSError):
                own.rmdir()
            why = f"a folder in {where} cannot be locked: {error.strerror}"
            raise OSError(error.errno, why) from None
        if lock is not None:
            return own, lock
        # Somebody who cleans up took it for an abandoned one before it was held, and removes it.


def _hold(folder: Path) -> int | None:
    """The descriptor that holds a folder's lock; None if somebody else holds it, or it is gone.

    Raises:
        OSError: it cannot be locked.
    """
    with contextlib.ExitStack() as unless_held:
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            unless_held.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(descriptor), os.stat(folder)):
                return None
        except (BlockingIOError, FileNotFoundError):
            return None
        unless_held.pop_all()
        return descriptor


def _remove_if_nobody_holds(folder: Path) -> None:
    try:
        lock = _hold(folder)
    except OSError:  # another user's, or no folder
        return
    if lock is None:
        return
    if os.fstat(lock).st_uid == os.geteuid():
        shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
