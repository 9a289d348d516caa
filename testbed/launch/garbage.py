"""Python's search for garbage, kept away from what lives as long as the process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def spare_what_lives() -> None:
    """From now on a search for garbage does not look through what exists already.

    A full search goes through the hundreds of thousands of objects that the libraries made when
    they were imported. It holds the interpreter for 0.2 s, so that no message of this rank moves
    and all others wait for it: every rank once within the first steps, and again later.

    Example:
        >>> spare_what_lives()
        >>> gc.get_freeze_count() > 1000
        True
        >>> gc.unfreeze()
    """
    gc.collect()
    gc.freeze()


@contextmanager
def without_what_lives() -> Iterator[None]:
    """Likewise, for as long as the context lasts; `spare_what_lives` may be called inside."""
    spare_what_lives()
    try:
        yield
    finally:
        gc.unfreeze()
