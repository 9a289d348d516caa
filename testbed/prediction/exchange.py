"""What one round of a compressed exchange takes, by the constants of a link measured with sums.

A sum of M bytes among n workers takes a + b M, with a = startups(n) alpha and b = transfers(n) beta
(`prediction.algorithms`). Other forms use the same alpha and beta:

| form | start-ups | bytes through the busiest interface, one direction |
|---|---|---|
| sum of M | startups(n) | transfers(n) M |
| gather of m each, ring and others | 2 (n - 1), the first half for the sizes | (n - 1) m |
| gather of m each, all at once (m <= at_once_bytes of a ring) | n - 1 | (n - 1) m |
| gather of m each, relayed by S servers | 2 | (w + max((n - 1) (S - 1) / S, (n - 1) w)) m |
| gather of m each, one server merges into m' | 2 | v (m + m') |
| the same of a message that is cut over S servers | 2 | max(w, v / S) (m + m') |
| deliver of m in all, ring and others | 2 (n - 1), the first half for the sizes | m |
| deliver of m in all, relayed by S servers | 2 | 2 w m |

Servers: w = max(1, n / S) dedicated, (n - 1) / S colocated; v = n dedicated, n - 1 colocated, as
the server that owns a key, or a range of it, serves all workers. Ranges have as many elements each;
as many selected ones only where large values are spread evenly, which is taken for granted here.
"""

from __future__ import annotations

from testbed.nouns import CUT_BYTES
from testbed.prediction.algorithms import Algorithm, Ring, Server
from testbed.prediction.codec import RoundCost
from testbed.prediction.costs import phases_s
from testbed.prediction.link import Link


def round_phases_s(
    each: RoundCost, link: Link, algorithm: Algorithm, message_bytes: float = 0.0
) -> tuple[float, float]:
    """Start-up and transfer seconds of one round alone on the link.

    Args:
        each: what it hands over, in bytes of each rank.
        link: measured with sums of dense messages; its piece for the same wire bytes counts.
        algorithm: that the link's backend sums by.
        message_bytes: of the message uncompressed, which decide whether servers share it.

    Returns:
        Both 0 with one worker.

    Example:
        >>> from testbed.prediction.algorithms import Ring
        >>> link = Link(backend="gloo", num_workers=4, latency_s=6e-3, seconds_per_byte=1.5e-9)
        >>> each = RoundCost(form="gather", num_bytes=1e6)
        >>> [round(s, 6) for s in round_phases_s(each, link, Ring())]
        [0.006, 0.003]
    """
    n = link.num_workers
    if n == 1 or (each.form == "sum" and each.num_bytes <= 0):
        return 0.0, 0.0
    startups, wire_bytes = _needs(each, n, algorithm, message_bytes)
    dense_bytes = wire_bytes / algorithm.transfers(n)
    # A round of no bytes still has its start-ups: sizes are told in any case.
    startup_s, transfer_s = phases_s(link, max(dense_bytes, 1.0))
    return (
        startup_s * startups / algorithm.startups(n),
        transfer_s if dense_bytes >= 1.0 else transfer_s * dense_bytes,
    )


def wire_bytes(
    each: RoundCost, num_workers: int, algorithm: Algorithm, message_bytes: float = 0.0
) -> float:
    """Bytes of a round through the busiest interface, in one direction."""
    return 0.0 if num_workers == 1 else _needs(each, num_workers, algorithm, message_bytes)[1]


def num_mergers(
    each: RoundCost, num_workers: int, algorithm: Algorithm, message_bytes: float
) -> int:
    """Servers that merge one message: all, if it is large and its payloads can be cut."""
    if not (isinstance(algorithm, Server) and each.can_cut and message_bytes >= CUT_BYTES):
        return 1
    count = algorithm.servers or num_workers
    return count if algorithm.placement == "dedicated" else min(count, num_workers)


def _needs(
    each: RoundCost, n: int, algorithm: Algorithm, message_bytes: float
) -> tuple[float, float]:
    """Start-ups one after another, and bytes through the busiest interface."""
    if each.form == "sum":
        return algorithm.startups(n), algorithm.transfers(n) * each.num_bytes
    if not isinstance(algorithm, Server):
        if each.form == "deliver":
            return 2 * (n - 1), each.num_bytes
        at_once = isinstance(algorithm, Ring) and each.num_bytes <= algorithm.at_once_bytes
        return (1 if at_once else 2) * (n - 1), (n - 1) * each.num_bytes
    dedicated = algorithm.placement == "dedicated"
    count = algorithm.servers or n
    share = max(1.0, n / count) if dedicated else (n - 1) / min(count, n)
    startups = algorithm.startups(n)
    if each.form == "deliver":
        return startups, 2 * share * each.num_bytes
    if each.merged_bytes:
        fan = (n if dedicated else n - 1) / num_mergers(each, n, algorithm, message_bytes)
        if dedicated:
            fan = max(1.0, fan)  # a worker's own payload and answer pass through its own interface
        return startups, fan * (each.num_bytes + each.merged_bytes)
    pull = max((n - 1) * (count - 1) / count, (n - 1) * share)
    return startups, (share + pull) * each.num_bytes
