"""What `mpi-ring:key=value,...` and `mpi:key=value,...` may set; no MPI is needed to read them."""

from __future__ import annotations

from dataclasses import dataclass

from testbed.base.errors import UsageError
from testbed.base.units import parse_bytes

MAX_SEGMENT_KIB = 1 << 20  # MPI counts bytes in 32 bits


@dataclass(frozen=True)
class RingOptions:
    """`mpi-ring`: a ring all-reduce in segments over MPI messages; doubling for small sums.

        ring:          T(M) = 2 (n - 1) (alpha + beta M / n)
        doubling:      T(M) = log2(n) (alpha + beta M)      where M <= switch_bytes
        levels=2:      2 (h - 1) / (h g) M bytes of each rank between h hosts of g ranks

    n ranks, M bytes; alpha: seconds of one start-up; beta: seconds per byte of a link in one
    direction. Doubling takes 2 (alpha + beta M) more where n is no power of two. Start-ups of
    segments overlap with transfers and are not in the model, nor are additions, which are made
    while the next segment arrives.

    Attributes:
        segment_kib: size of a message in KiB; adding one overlaps receiving the next.
        switch_bytes: sums up to this size (`64K`) go by recursive doubling; `auto` = measured.
        levels: 1 = one ring over all ranks; 2 = inside hosts, between hosts, inside hosts.
        group_size: for `levels=2`: consecutive ranks that count as one host; None = real hosts.

    Raises:
        UsageError: a value outside of that; when it is opened: hosts with different numbers of
            ranks under `levels=2`.
        Unavailable: mpi4py is not installed, or MPI allows one thread only.
        RankLost, DeadlineExceeded: of a request: a rank was lost, or is late.

    Example:
        >>> from testbed.backends.mpi.flow import flat_groups, sum_flows
        >>> from testbed.base.types import Op
        >>> (flow,) = sum_flows(flat_groups(4), rank=0, num_elements=8, segment=1, op=Op.ALL_REDUCE)
        >>> sum(end - begin for begin, end in flow.sends)  # 2 (n - 1) / n of 8 elements
        12

    Reference:
        Patarasuk and Yuan, 2009, J. Parallel Distrib. Comput. (ring); Thakur, Rabenseifner and
        Gropp, 2005, Int. J. High Perform. Comput. Appl. (recursive doubling). Departs: each hop is
        cut into segments, and a segment is passed on as soon as it has been added.
    """

    segment_kib: int = 512
    switch_bytes: str = "auto"
    levels: int = 1
    group_size: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.segment_kib <= MAX_SEGMENT_KIB:
            raise UsageError(
                f"segment_kib is {self.segment_kib}; expected 1 .. {MAX_SEGMENT_KIB}; "
                "512 is a good start"
            )
        if self.levels not in (1, 2):
            raise UsageError(f"levels is {self.levels}; expected 1 (flat) or 2 (hosts)")
        if self.group_size is not None and self.group_size < 1:
            raise UsageError(f"group_size is {self.group_size}; expected 1 or more ranks")
        if self.group_size is not None and self.levels == 1:
            raise UsageError("group_size is given but levels is 1; add levels=2")
        if self.switch_bytes != "auto":
            parse_bytes(self.switch_bytes)

    @property
    def segment_bytes(self) -> int:
        """Bytes of a segment."""
        return self.segment_kib * 1024

    @property
    def fixed_switch_bytes(self) -> int | None:
        """The size up to which sums go by recursive doubling; None = measure it."""
        return None if self.switch_bytes == "auto" else parse_bytes(self.switch_bytes)


@dataclass(frozen=True)
class LibraryOptions:
    """`mpi`: the MPI library's own collectives.

        all-reduce: MPI_Iallreduce(MPI_IN_PLACE, x, MPI_SUM), tested until it is complete

    The library chooses the algorithm by itself. It is predicted as a ring, T(M) = 2 (n - 1) (alpha
    + beta M / n) for M bytes over n ranks (alpha in s, beta in s/byte), and traffic is counted as a
    ring's, 2 (n - 1) / n of the bytes each way: the least that any all-reduce needs.

    Attributes:
        blocking: call `MPI_Allreduce` and its like instead of starting `MPI_Iallreduce` and testing
            it; the backend's thread then waits inside the library, on one channel only.

    Raises:
        UsageError: `blocking` is neither 0 nor 1; when it is opened: `blocking=1` on several
            channels.
        Unavailable: mpi4py is not installed, or MPI allows one thread only.
        RankLost, DeadlineExceeded: of a request: a rank was lost, or is late.

    Example:
        >>> from testbed.base.axes import BACKENDS
        >>> library = BACKENDS.resolve("mpi:blocking=1")
        >>> library.options, library.facts.algorithm, library.facts.bus_factor(4)
        (LibraryOptions(blocking=True), 'ring', 1.5)

    Reference:
        MPI Forum, 2021, MPI 4.0, chapter 6 (collectives, also nonblocking ones). Departs: 16-bit
        floats, which MPI cannot add, are summed in float32, so that 32 bits of each travel.
    """

    blocking: bool = False
