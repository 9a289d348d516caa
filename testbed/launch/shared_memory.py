"""A folder for the memory that MPI's ranks of one machine share.

Open MPI keeps a file of some MiB for each rank in /dev/shm and removes it when the rank ends well.
After kill -9 it would stay, in memory, until the next boot.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from testbed.cluster.owner import abandoned, own_prefix

FOLDER = Path("/dev/shm")


@contextlib.contextmanager
def shared_memory(folder: Path = FOLDER) -> Iterator[Path | None]:
    """A folder of this process's own, gone after the block; None where none can be made.

    Folders that owners left which were killed are removed first.

    Args:
        folder: where the memory's files are.
    """
    if not os.access(folder, os.W_OK):
        yield None
        return
    for name in abandoned(os.listdir(folder)):
        # Another user's cannot be removed, and are not ours to remove.
        shutil.rmtree(folder / name, ignore_errors=True)
    own = folder / f"{own_prefix()}-shared"
    own.mkdir(mode=0o700, exist_ok=True)
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)
