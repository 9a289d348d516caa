"""The options of the parameter server, checked when they are made."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from testbed.base.errors import UsageError

MAX_SLICE_KIB = 1 << 20


@dataclass(frozen=True)
class ZmqPsOptions:
    """`zmq-ps`: parameter servers over ZeroMQ; where they are, what they hold, their consistency.

        colocated:  T(M) = 2 alpha + (n + S - 2) / S beta M
        dedicated:  T(M) = 2 alpha + max(1, n / S) beta M
        ssp:s:      the worker that pushed clock c goes on when c - min over all clocks <= s

    n workers, S servers that hold M / S bytes each; alpha: seconds of one start-up; beta: seconds
    per byte of a link in one direction; one slice is pushed while another is pulled. With S = n
    colocated servers a link carries 2 (n - 1) / n M, as a ring's.

    Attributes:
        servers: `colocated` (one beside every worker), `colocated:S` (beside the first S workers)
            or `dedicated:S` (S processes of their own).
        consistency: `bsp`, `ssp:<staleness>` or `async`.
        update: `worker` (servers add gradients) or `server` (servers hold the parameters and run
            the optimizer); None = `worker` for bsp, `server` otherwise.
        slice_kib: largest payload of one message in KiB; smaller overlaps push and pull better,
            larger costs fewer messages.
        repack: for compressed gradients that servers merge: encode the mean again for the way back,
            with the codec that the workers used and error feedback on the server; else it goes back
            without loss. None: as the authors of the compressor do (onebit and ef-sign are encoded
            again). Compressors that only combine (dgc) never are.

    Raises:
        UsageError: a value that none of these words describes, or update=worker without bsp; when
            it is opened: more colocated servers than workers, or a GPU as device.
        Unavailable: pyzmq is not installed.
        RankLost, DeadlineExceeded: of a request: a worker or a server was lost, or is late.

    Example:
        >>> from testbed.backends.zmq_ps.placement import busiest_link_bytes
        >>> [busiest_link_bytes(64, 4, ZmqPsOptions(f"colocated:{s}")) for s in (1, 2, 4)]
        [192.0, 128.0, 96.0]
        >>> ZmqPsOptions(servers="dedicated:2", consistency="ssp:4").update_on_server
        True

    Reference:
        Li et al., 2014, OSDI (parameter server); Ho et al., 2013, NeurIPS (ssp); Jiang et al.,
        2020, OSDI (BytePS: colocated servers). Departs: every tensor is cut evenly over the
        servers, not by consistent hashing of keys; servers add in rank order, so that results do
        not depend on timing.
    """

    servers: str = "colocated"
    consistency: str = "bsp"
    update: Literal["worker", "server"] | None = None
    slice_kib: int = 1024
    repack: bool | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"colocated|(colocated|dedicated):[1-9]\d{0,3}", self.servers):
            raise UsageError(
                f"zmq-ps: servers is {self.servers!r}; expected colocated, colocated:S or "
                "dedicated:S with S servers, S >= 1"
            )
        if not re.fullmatch(r"bsp|async|ssp:\d{1,6}", self.consistency):
            raise UsageError(
                f"zmq-ps: consistency is {self.consistency!r}; expected bsp, ssp:<staleness> with "
                "a staleness of 0 or more clocks, or async"
            )
        if self.update not in (None, "worker", "server"):
            raise UsageError(f"zmq-ps: update is {self.update!r}; expected worker or server")
        if self.update == "worker" and self.consistency != "bsp":
            raise UsageError(
                f"zmq-ps: update=worker cannot be combined with consistency={self.consistency}: "
                "workers that are not in step need parameters on the server; use update=server"
            )
        if not 1 <= self.slice_kib <= MAX_SLICE_KIB:
            raise UsageError(
                f"zmq-ps: slice_kib is {self.slice_kib}; expected 1 to {MAX_SLICE_KIB} KiB"
            )

    @property
    def update_on_server(self) -> bool:
        """Whether the servers hold the parameters and run the optimizer."""
        return self.update == "server" or self.consistency != "bsp"

    @property
    def staleness(self) -> int | None:
        """Clocks that the slowest worker may be behind: 0 for bsp, None for async (no bound)."""
        if self.consistency == "async":
            return None
        _, _, staleness = self.consistency.partition(":")
        return int(staleness or 0)

    @property
    def num_dedicated(self) -> int:
        """Server processes of their own; 0 where servers are colocated."""
        where, _, count = self.servers.partition(":")
        return int(count) if where == "dedicated" else 0

    def num_servers(self, num_workers: int) -> int:
        """Servers of a job with so many workers.

        Raises:
            UsageError: more colocated servers than workers.
        """
        _, _, count = self.servers.partition(":")
        wanted = int(count or num_workers)
        if self.num_dedicated == 0 and wanted > num_workers:
            raise UsageError(
                f"zmq-ps: servers={self.servers} asks for {wanted} servers beside {num_workers} "
                "workers; ask for fewer, or for dedicated ones"
            )
        return wanted

    @property
    def slice_bytes(self) -> int:
        """Largest payload of one message in bytes."""
        return self.slice_kib * 1024
