"""Which server holds which slice of a tensor: pure, so that all ranks compute the same.

Every tensor is cut evenly over the servers, whatever its size beside the others, because giving
whole tensors to servers leaves the one with the largest tensor as the bottleneck. Tensors too small
to be worth a message per server go to fewer servers, starting at one that the key decides.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from testbed.backends.zmq_ps.options import ZmqPsOptions
from testbed.base.types import shard_bounds

MIN_SHARD_BYTES = 32 * 1024
"""Below this a further message costs more than sharing its bytes saves."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A run of elements of a tensor and the server that holds it."""

    server: int
    offset: int
    num_elements: int


@lru_cache(maxsize=8192)  # the same messages come in every step
def place(
    key: str, num_elements: int, element_size: int, num_servers: int, slice_bytes: int
) -> tuple[Slice, ...]:
    """Slices of one tensor: every element once, each slice on one server.

    The load of no server exceeds `num_bytes / num_servers` by more than one slice; from
    `num_servers * MIN_SHARD_BYTES` on, by less than one element. Slices come in turns over the
    servers, so that all of them are busy from the start.

    Args:
        key: name of the tensor; decides which server comes first.
        num_elements: elements of the tensor; a tensor without any is one slice without any.
        element_size: bytes of one element.
        num_servers: at least 1.
        slice_bytes: largest payload of one slice; at least one element is put into each.

    Example:
        >>> [(s.offset, s.num_elements) for s in place("w", 10, 4, 2, 16 * 1024)]
        [(0, 10)]

    Reference:
        Li et al., 2014, OSDI (key ranges over servers). Departs: ranges are cut within each tensor,
        as BytePS (Jiang et al., 2020) does, and not by consistent hashing.
    """
    first = zlib.crc32(key.encode())
    num_bytes = num_elements * element_size
    worthwhile = max(num_bytes // MIN_SHARD_BYTES, -(-num_bytes // slice_bytes), 1)
    num_shards = min(num_servers, worthwhile)
    bounds = shard_bounds(num_elements, num_shards)
    per_slice = max(1, slice_bytes // element_size)
    turns: list[list[Slice]] = []
    for shard in range(num_shards):
        server = (first + shard) % num_servers
        start, stop = bounds[shard], bounds[shard + 1]
        num_slices = max(1, -(-(stop - start) // per_slice))
        cuts = shard_bounds(stop - start, num_slices)
        turns.append(
            [
                Slice(server, start + low, high - low)
                for low, high in pairwise(cuts)
                if high > low or num_elements == 0
            ]
        )
    longest = max(len(shard) for shard in turns)
    return tuple(turn[i] for i in range(longest) for turn in turns if i < len(turn))


def busiest_link_bytes(num_bytes: float, num_workers: int, options: ZmqPsOptions) -> float:
    """Bytes that the busiest network link carries in one direction for one sum.

    Colocated, S servers beside n workers, M bytes: the host of a server sends the (S - 1) shards of
    its worker to other servers, and its server's shard to the n - 1 other workers:

        M (S - 1) / S + M (n - 1) / S  =  M (n + S - 2) / S

    and receives as much; the host of a worker alone moves M, which is never more. Dedicated: a
    worker moves M in each direction; a server receives its M / S from n workers (push) and sends
    it to n workers (pull):

        max(M, n M / S)

    Args:
        num_bytes: bytes M of the tensor, large enough to be cut over all servers.
        num_workers: n >= 1.
        options: where the servers are.

    Example:
        >>> busiest_link_bytes(64, 4, ZmqPsOptions()), 2 * 64 * 3 / 4
        (96.0, 96.0)

    Reference:
        Jiang et al., 2020, OSDI (BytePS), section 4.1. Departs: all links are taken as equal.
    """
    num_servers = options.num_servers(num_workers)
    if options.num_dedicated:
        return max(float(num_bytes), num_workers * num_bytes / num_servers)
    return num_bytes * (num_workers + num_servers - 2) / num_servers


def busiest_link(num_workers: int, options: ZmqPsOptions) -> str:
    """Whose link that is, in words; see `busiest_link_bytes`.

    Args:
        num_workers: n >= 1.
        options: where the servers are.

    Example:
        >>> [busiest_link(4, ZmqPsOptions(f"dedicated:{s}")) for s in (1, 4, 8)]
        ["each server's", "every machine's", "each worker's"]
        >>> [busiest_link(4, ZmqPsOptions(f"colocated:{s}")) for s in (2, 4)]
        ["each machine's with a server", "every machine's"]
    """
    num_servers = options.num_servers(num_workers)
    if num_servers == num_workers:
        return "every machine's"
    if not options.num_dedicated:
        return "each machine's with a server"
    return "each server's" if num_servers < num_workers else "each worker's"


# Which server merges which key: pure, so that all ranks compute the same.


class Owners:
    """Each new key goes to the server that has the fewest bytes of its channel so far.

    A payload that is not cut (small ones, `types.CUT_BYTES`, and those that cannot be) goes whole
    to one server. Keys are balanced by the bytes of the uncompressed message, which are equal on
    all ranks; sizes of payloads may differ. Ranks agree on the order of requests within a channel,
    not across channels, so each channel is balanced for itself and begins at another server. Within
    a channel two servers differ by at most one key's bytes.

    Args:
        num_servers: at least 1.

    Example:
        >>> owners = Owners(2)
        >>> [owners.owner(0, key, size) for key, size in (("a", 9), ("b", 4), ("c", 4), ("a", 9))]
        [0, 1, 1, 0]
    """

    def __init__(self, num_servers: int) -> None:
        self._num_servers = num_servers
        self._owners: dict[tuple[int, str], int] = {}
        self._loads: dict[int, list[int]] = {}

    def owner(self, channel: int, key: str, num_bytes: int) -> int:
        """The server of a key on a channel, always the same; called as requests start.

        Args:
            channel: of the request.
            key: its name.
            num_bytes: of the message, equal on all ranks; counts when the key is new.
        """
        name = (channel, key)
        if name not in self._owners:
            loads = self._loads.setdefault(channel, [0] * self._num_servers)
            turns = [(channel + turn) % self._num_servers for turn in range(self._num_servers)]
            server = min(turns, key=lambda s: loads[s])
            loads[server] += max(1, num_bytes)
            self._owners[name] = server
        return self._owners[name]
