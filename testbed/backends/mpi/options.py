"""What `mpi-ring:key=value,...` and `mpi:key=value,...` may set; no MPI is needed to read them."""

from __future__ import annotations

from dataclasses import dataclass

from testbed.base.errors import UsageError
from testbed.base.units import parse_bytes

MAX_SEGMENT_KIB = 1 << 20  # MPI counts bytes in 32 bits


@dataclass(frozen=True)
class RingOptions:
    """Options of the ring all-reduce.

    Attributes:
        segment_kib: size of a message in KiB; adding one overlaps receiving the next.
        switch_bytes: sums up to this size (`64K`) go by recursive doubling; `auto` = measured.
        levels: 1 = one ring over all ranks; 2 = inside hosts, between hosts, inside hosts.
        group_size: for `levels=2`: consecutive ranks that count as one host; None = real hosts.
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
    """Options of the MPI library's own collectives.

    Attributes:
        blocking: call `MPI_Allreduce` and its like instead of starting `MPI_Iallreduce` and testing
            it; the backend's thread then waits inside the library, on one channel only.
    """

    blocking: bool = False
