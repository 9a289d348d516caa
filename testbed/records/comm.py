"""`testbed.comm/1`: what one micro-benchmark leaves behind, in one JSON file.

Times are seconds, sizes bytes, bandwidths bytes per second; the unit is part of each key.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from testbed.microbench.config import CommConfig

COMM_SCHEMA: Final = "testbed.comm/1"


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
        num_wrong: wrong elements on all ranks together; null = not checked.
        samples_s: one per timed exchange, in order: seconds from submit to the end of wait on the
            slowest rank, after a barrier.
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


class CommRecord(msgspec.Struct, kw_only=True):
    """All results of one job, size by size, the backends of a size together.

    Attributes:
        results: one per size and backend.
        config: what was asked for.
        environment: commit, versions, hardware, launcher, hosts, variables.
        command: shell command that measures the same again.
    """

    schema: Literal["testbed.comm/1"] = COMM_SCHEMA
    results: list[CommResult]
    config: CommConfig
    environment: dict[str, Any] = {}
    command: str = ""


def encode_comm(record: CommRecord) -> bytes:
    """The record as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"


def decode_comm(data: bytes) -> CommRecord:
    """A record from JSON.

    Raises:
        msgspec.ValidationError: the JSON is no `testbed.comm/1`; the message names the key.
    """
    return msgspec.json.decode(data, type=CommRecord)
