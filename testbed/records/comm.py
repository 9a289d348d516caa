"""`testbed.comm/1`: what one micro-benchmark was asked for and found, in one JSON file.

Times are seconds, sizes bytes, bandwidths bytes per second; the unit is part of each key.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from testbed.base.dtypes import ELEMENT_BYTES, Dtype
from testbed.base.errors import UsageError

COMM_SCHEMA: Final = "testbed.comm/1"

Operation = Literal["sum", "fold-spread", "gather", "broadcast"]
Device = Literal["cpu", "cuda"]

# The largest integer up to which the dtype holds every integer.
EXACT_UP_TO: Final[dict[Dtype, int]] = {
    "float32": 1 << 24,
    "float64": 1 << 53,
    "float16": 1 << 11,
    "bfloat16": 1 << 8,
    "int64": 1 << 53,
    "int32": (1 << 31) - 1,
    "uint8": 255,
}


class CommConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which exchanges are measured over which backends.

    Attributes:
        backend: specifications, each a row of every size.
        workers: ranks that exchange.
        cluster: the emulated cluster that they are in; None = none.
        min_bytes: the smallest size.
        max_bytes: no size is above it.
        factor: each size is so many times the one before it.
        iters: timed exchanges of each backend and size.
        warmup: exchanges before them that are not timed.
        dtype: of the elements.
        op: what is exchanged: a sum (all-reduce), its two halves, a gather or a broadcast.
        check: of the timed exchanges, the last so many have every element compared; 0 = none.
        device: `cpu` or `cuda`: where the tensors are.
        deadline: seconds in which one exchange must be done.
        seed: of the order in which the backends take turns.
        threads: torch threads per rank; None = cores / ranks.

    Raises:
        UsageError: a value outside its range; says what is expected.
    """

    backend: tuple[str, ...]
    workers: int = 2
    cluster: str | None = None
    min_bytes: int = 4 << 10
    max_bytes: int = 64 << 20
    factor: int = 4
    iters: int = 20
    warmup: int = 5
    dtype: Dtype = "float32"
    op: Operation = "sum"
    check: int = 1
    device: Device = "cpu"
    deadline: float = 10.0
    seed: int = 1
    threads: int | None = None

    def __post_init__(self) -> None:
        if not self.backend:
            raise UsageError("--backend names none; expected one or more, as mpi-ring,mpi,gloo")
        twice = {name for name in self.backend if self.backend.count(name) > 1}
        if twice:
            raise UsageError(f"--backend names {', '.join(sorted(twice))} more than once")
        for name, value, least in (
            ("workers", self.workers, 1),
            ("factor", self.factor, 2),
            ("iters", self.iters, 1),
            ("warmup", self.warmup, 0),
            ("check", self.check, 0),
            ("threads", self.threads, 1),
        ):
            if value is not None and value < least:
                raise UsageError(f"--{name} is {value}; expected {least} or more")
        if not self.deadline > 0:
            raise UsageError(f"--deadline is {self.deadline}; expected seconds above 0")
        if self.check > self.iters:
            raise UsageError(
                f"--check is {self.check} but --iters is {self.iters}; the checked exchanges are "
                "some of the timed ones: expected no more"
            )
        if self.workers > EXACT_UP_TO[self.dtype]:
            raise UsageError(
                f"{self.dtype} cannot hold the exact sum over {self.workers} workers, so that no "
                "result could be checked; use --dtype float32, or fewer workers"
            )
        self._check_sizes()

    def _check_sizes(self) -> None:
        if self.min_bytes > self.max_bytes:
            raise UsageError(
                f"--min is {self.min_bytes} bytes and --max is {self.max_bytes}; expected min <= "
                "max"
            )
        parts = self.workers if self.op == "gather" else 1
        if self.min_bytes < parts * self.element_bytes:
            whose = f" from each of {parts} workers" if parts > 1 else ""
            raise UsageError(
                f"--min is {self.min_bytes} bytes; expected at least {parts * self.element_bytes}: "
                f"one {self.dtype} element{whose}"
            )

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return ELEMENT_BYTES[self.dtype]


class CommResult(msgspec.Struct, kw_only=True):
    """One size over one backend.

    Attributes:
        backend: specification, as given.
        num_workers: ranks that exchanged.
        num_bytes: size of the tensor (gather: of the result, all ranks' parts together).
        count: elements that each rank gave.
        dtype: of the elements.
        op: `sum`, `fold-spread`, `gather` or `broadcast`.
        time_s: median of `samples_s`.
        time_p5_s: 5 % quantile.
        time_p95_s: 95 % quantile.
        algbw_bytes_per_s: num_bytes / time_s.
        busbw_bytes_per_s: bytes through the busiest link in one direction / time_s; see
            `testbed.microbench.bandwidth`.
        line_rate_share: in an emulated cluster of one rank per node: busbw over what the kernel
            lets through the slowest link; null = elsewhere.
        num_wrong: wrong elements on all ranks together; null = not checked.
        samples_s: one per timed exchange, in order: seconds from submit to the end of wait on the
            slowest rank, after a barrier.
        fastest_s: median over the same exchanges of the fastest rank's time, which waited for no
            other rank (cross-rank minimum); null in records of before.
        rank_means_s: mean over the same exchanges of each rank's own time, in rank order.
    """

    backend: str
    num_workers: int
    num_bytes: int
    count: int
    dtype: str
    op: str
    time_s: float
    time_p5_s: float
    time_p95_s: float
    algbw_bytes_per_s: float
    busbw_bytes_per_s: float
    num_wrong: int | None
    samples_s: list[float]
    line_rate_share: float | None = None
    fastest_s: float | None = None
    rank_means_s: list[float] = []


class CommRecord(msgspec.Struct, kw_only=True):
    """All results of one job, size by size, the backends of a size together.

    Attributes:
        results: one per size and backend.
        config: what was asked for.
        dilation: how many times slower than the emulated cluster everything was; times and
            bandwidths here are real ones, the table shows those of the cluster.
        cluster: the emulated cluster: rates asked and set, how latency was made; null = none.
        environment: commit, versions, hardware, launcher, hosts, variables.
        command: shell command that measures the same again.
    """

    schema: Literal["testbed.comm/1"] = COMM_SCHEMA
    results: list[CommResult]
    config: CommConfig
    dilation: float = 1.0
    cluster: dict[str, Any] | None = None
    environment: dict[str, Any] = {}
    command: str = ""
