"""Bandwidths of an exchange from its size and time, as nccl-tests and the papers define them.

    algbw = size / time                GB/s: what the caller sees; GB = 1e9 bytes
    busbw = algbw * factor(n)          what the busiest link carries in one direction

The factor is the busiest link's bytes over the tensor's, so that busbw can be held against the
speed of the hardware whatever the number of workers n. For a sum (all-reduce) of M bytes over a
ring, every worker sends its M / n shard n - 1 times while folding and n - 1 times while spreading:

    factor = 2 (n - 1) / n

and no algorithm gives the busiest link less: n - 1 shards' worth of every worker's data must leave
it to be added, and the result must come back (Patarasuk and Yuan, 2009). A fold and a spread one
after the other move the same bytes. A gather, whose size is that of its result, moves
(n - 1) / n of it into each worker; a broadcast moves all of it into each worker but one:

    gather: (n - 1) / n                broadcast: 1

For sums through a parameter server the busiest link carries another amount, which depends on where
the servers stand (`zmq_ps.placement.busiest_link_bytes`): M (n + S - 2) / S with S servers beside
workers, which is the ring's amount for S = n, and max(M, n M / S) with S dedicated ones. Gather and
broadcast have the factors above on every backend: they are what the operation needs, not what an
algorithm spends.

Reference:
    nccl-tests, doc/PERFORMANCE.md. Departs: sums over parameter servers, which it does not know.
"""

from __future__ import annotations

from testbed.records.comm import Operation

BYTES_PER_GB = 1e9


def algbw_bytes_per_s(num_bytes: int, time_s: float) -> float:
    """Algorithm bandwidth: the size of the tensor (gather: of the result) over the time.

    Args:
        num_bytes: bytes M.
        time_s: seconds of one exchange, above 0.

    Raises:
        ValueError: the time is not above 0.

    Example:
        >>> algbw_bytes_per_s(64_000_000, 0.1) / BYTES_PER_GB
        0.64
    """
    if not time_s > 0:
        raise ValueError(f"time is {time_s} s; expected above 0")
    return num_bytes / time_s


def bus_factor(operation: Operation, num_workers: int, sum_factor: float) -> float:
    """What busbw is of algbw.

    Args:
        operation: what was measured.
        num_workers: n >= 1; a single worker uses no link.
        sum_factor: the backend's own factor of a sum over n workers.

    Example:
        >>> [bus_factor(o, 4, 1.5) for o in ("sum", "fold-spread", "gather", "broadcast")]
        [1.5, 1.5, 0.75, 1.0]
        >>> bus_factor("broadcast", 1, 0.0)
        0.0
    """
    if operation == "gather":
        return (num_workers - 1) / num_workers
    if operation == "broadcast":
        return 1.0 if num_workers > 1 else 0.0
    return sum_factor


def busbw_bytes_per_s(num_bytes: int, time_s: float, factor: float) -> float:
    """Bus bandwidth: bytes through the busiest link in one direction over the time.

    Args:
        num_bytes: bytes M.
        time_s: seconds of one exchange, above 0.
        factor: of `bus_factor`.

    Example:
        >>> busbw_bytes_per_s(64_000_000, 0.1, 2 * (4 - 1) / 4) / BYTES_PER_GB
        0.96
    """
    return algbw_bytes_per_s(num_bytes, time_s) * factor
