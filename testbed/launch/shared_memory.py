"""A folder for the memory that MPI's ranks of one machine share.

Open MPI keeps a file of some MiB for each rank in /dev/shm and removes it when the rank ends well.
After kill -9 it would stay, in memory, until the next boot.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path("/dev/shm")
PREFIX, SUFFIX = "testbed-", "-shared"


@contextlib.contextmanager
def shared_memory(folder: Path = FOLDER) -> Iterator[Path | None]:
    """A folder of this job's own, gone after the block; None where none can be made.

    Its owner holds a lock on it, which ends with the owner however that ends: folders that nobody
    holds are removed first, if they are this user's. Process ids would not tell, for containers
    that share the memory count their processes each for itself.

    Args:
        folder: where the memory's files are.
    """
    for abandoned in folder.glob(f"{PREFIX}*{SUFFIX}"):
        _remove_if_nobody_holds(abandoned)
    made = _make(folder)
    if made is None:
        yield None
        return
    own, lock = made
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)
        os.close(lock)


def _make(folder: Path) -> tuple[Path, int] | None:
    """A new folder and the descriptor that holds its lock; None if there may be none here."""
    while True:
        try:
            own = Path(tempfile.mkdtemp(SUFFIX, PREFIX, folder))
        except OSError:
            return None
        lock = _hold(own)
        if lock is not None:
            return own, lock
        # Somebody who cleaned up took it for an abandoned one before it was held.


def _hold(folder: Path) -> int | None:
    """The descriptor that holds a folder's lock; None if somebody else holds it, or it is gone."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(folder)):
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def _remove_if_nobody_holds(folder: Path) -> None:
    lock = _hold(folder)
    if lock is None:
        return
    if os.fstat(lock).st_uid == os.geteuid():
        shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
