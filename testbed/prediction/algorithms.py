"""How an exchange's cost grows with the number of workers, for each algorithm.

    T(M) = startups(n) alpha + transfers(n) beta M

alpha: seconds of one point-to-point message, beta: seconds per byte of one network interface in one
direction (full duplex). `transfers` is what the busiest interface carries, as a multiple of M.
Additions are part of beta.

| algorithm | startups(n) | transfers(n) |
|---|---|---|
| ring | 2 (n - 1) | 2 (n - 1) / n |
| halving-doubling | 2 log2 n | 2 (n - 1) / n |
| recursive-doubling | log2 n | log2 n |
| tree (two complementary ones, pipelined) | 2 log2 n | 2 |
| binomial (reduce, then broadcast, unpipelined) | 2 log2 n | 2 log2 n |
| server, dedicated, S of them | 2 | 2 max(1, n / S), overlapped max(1, n / S) |
| server, colocated, S of them | 2 | 2 (n - 1) / S, overlapped (n + S - 2) / S |

Where n is no power of two, the extra ranks of halving-doubling and recursive-doubling are folded in
before and out after: 2 alpha + 2 beta M more than for the power of two below. `server` costs
2 (o / alpha) max(n, S) start-ups more if each message takes an endpoint o seconds of its own.

Reference:
    Thakur, Rabenseifner and Gropp, 2005 (collectives); Sanders, Speck and Traff, 2009 (two trees;
    departs: without the time to fill the pipeline).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import Final, Literal, Protocol

import msgspec

from testbed.base.axes import BACKENDS
from testbed.base.errors import UnknownName, UsageError
from testbed.base.link import Link, phases_s
from testbed.base.spec import parse_options, parse_spec
from testbed.base.types import CUT_BYTES
from testbed.prediction.codec import RoundCost

GIVEN: Final = "testbed.algorithm"  # key of `Link.extra`, which no file has by chance


class Algorithm(Protocol):
    """What one exchange over n >= 2 workers takes, in units of the network's constants."""

    def startups(self, num_workers: int) -> float:
        """Point-to-point start-ups one after another."""
        ...

    def transfers(self, num_workers: int) -> float:
        """What the busiest interface carries in one direction, over the message's bytes."""
        ...


@dataclass(frozen=True)
class Ring:
    """Reduce-scatter and all-gather around a ring.

    Attributes:
        at_once_bytes: gathers of payloads up to this size go to all ranks at once, sizes included.

    Example:
        >>> Ring().startups(4), Ring().transfers(4)
        (6, 1.5)
    """

    at_once_bytes: int = 0

    def __post_init__(self) -> None:
        if self.at_once_bytes < 0:
            raise UsageError(
                f"ring: at_once_bytes is {self.at_once_bytes}; expected 0 (never) or more"
            )

    def startups(self, num_workers: int) -> float:
        """2 (n - 1)."""
        return 2 * (num_workers - 1)

    def transfers(self, num_workers: int) -> float:
        """2 (n - 1) / n."""
        return 2 * (num_workers - 1) / num_workers


@dataclass(frozen=True)
class HalvingDoubling:
    """Recursive halving of the message, then recursive doubling.

    Example:
        >>> HalvingDoubling().startups(8), HalvingDoubling().transfers(8)
        (6, 1.75)
        >>> HalvingDoubling().startups(9), HalvingDoubling().transfers(9)
        (8, 3.75)
    """

    def startups(self, num_workers: int) -> float:
        """2 log2 n, and 2 for extra ranks."""
        rounds, extra = _rounds(num_workers)
        return 2 * rounds + 2 * extra

    def transfers(self, num_workers: int) -> float:
        """2 (n - 1) / n, and 2 for extra ranks."""
        rounds, extra = _rounds(num_workers)
        return 2 * (1 - 2.0**-rounds) + 2 * extra


@dataclass(frozen=True)
class RecursiveDoubling:
    """Whole messages, exchanged and added in pairs."""

    def startups(self, num_workers: int) -> float:
        """log2 n, and 2 for extra ranks."""
        rounds, extra = _rounds(num_workers)
        return rounds + 2 * extra

    def transfers(self, num_workers: int) -> float:
        """log2 n, and 2 for extra ranks."""
        return self.startups(num_workers)


@dataclass(frozen=True)
class Tree:
    """Two complementary binary trees, each for half of the message, pipelined."""

    def startups(self, num_workers: int) -> float:
        """2 log2 n."""
        return 2 * log2(num_workers)

    def transfers(self, num_workers: int) -> float:
        """2: an inner node sends one half up and the other half down, twice; 1 for two workers."""
        return 2.0 if num_workers > 2 else 1.0


@dataclass(frozen=True)
class Binomial:
    """A binomial tree up and another down, whole messages."""

    def startups(self, num_workers: int) -> float:
        """2 log2 n."""
        return 2 * log2(num_workers)

    def transfers(self, num_workers: int) -> float:
        """2 log2 n."""
        return 2 * log2(num_workers)


@dataclass(frozen=True)
class Server:
    """A parameter server whose S servers hold equal shards.

    Attributes:
        servers: S; 0 = as many as workers.
        placement: `colocated` on the workers' machines, at most one each, or `dedicated` machines.
        overlap: whether one chunk is pulled while another is pushed.
        endpoint: time o that a message takes an endpoint, over alpha.

    Example:
        >>> Server().transfers(8), Server(servers=2).transfers(8), Ring().transfers(8)
        (1.75, 4.0, 1.75)
        >>> Server(servers=8, placement="dedicated").transfers(8)
        1.0
    """

    servers: int = 0
    placement: Literal["colocated", "dedicated"] = "colocated"
    overlap: bool = True
    endpoint: float = 0.0

    def __post_init__(self) -> None:
        if self.servers < 0 or self.endpoint < 0:
            raise UsageError(
                f"server: servers is {self.servers} and endpoint {self.endpoint:g}; expected 0 or "
                "more each; servers=0 means one for each worker"
            )

    def startups(self, num_workers: int) -> float:
        """2, and 2 o / alpha for each of the messages that one endpoint has."""
        return 2 + 2 * self.endpoint * max(num_workers, self._count(num_workers))

    def transfers(self, num_workers: int) -> float:
        """See the table above."""
        count = self._count(num_workers)
        if self.placement == "dedicated":
            return max(1.0, num_workers / count) * (1 if self.overlap else 2)
        if self.overlap:
            # A machine without a server carries the whole message once each way.
            return max((num_workers + count - 2) / count, float(count < num_workers))
        return 2 * (num_workers - 1) / count

    def _count(self, num_workers: int) -> int:
        count = self.servers or num_workers
        return min(count, num_workers) if self.placement == "colocated" else count


ALGORITHMS: dict[str, type[Algorithm]] = {
    "ring": Ring,
    "halving-doubling": HalvingDoubling,
    "recursive-doubling": RecursiveDoubling,
    "tree": Tree,
    "binomial": Binomial,
    "server": Server,
}


def parse_algorithm(text: str) -> Algorithm:
    """An algorithm given as `name` or `name:key=value,...`.

    Raises:
        UnknownName: none of this name; the message lists the known ones.
        UsageError: an option that it does not have.

    Example:
        >>> parse_algorithm("server:servers=2,placement=dedicated").transfers(8)
        4.0
    """
    spec = parse_spec(text)
    if spec.name not in ALGORITHMS:
        raise UnknownName("algorithm", spec.name, ALGORITHMS)
    return parse_options(spec.name, spec.options, ALGORITHMS[spec.name])


def algorithm_of(backend: str) -> str:
    """The algorithm that a backend declares, as text.

    Raises:
        UsageError: it declares none, or it is not known here.

    Example:
        >>> algorithm_of("zmq-ps:servers=dedicated:2"), algorithm_of("zmq-ps"), algorithm_of("gloo")
        ('server:servers=2,placement=dedicated', 'server', 'ring')
    """
    declared = declared_algorithm(backend)
    if declared is None:
        why = "is not known here" if BACKENDS.find(backend) is None else "declares no algorithm"
        raise UsageError(
            f"backend {backend!r} {why}, so that nothing can be predicted at other numbers of "
            f"workers or under a compressor; say what it does, as one of {', '.join(ALGORITHMS)}"
        )
    return declared


def declared_algorithm(backend: str) -> str | None:
    """The algorithm that a backend declares, as text; None: it declares none, or is not known here.

    Example:
        >>> declared_algorithm("gloo"), declared_algorithm("none"), declared_algorithm("elsewhere")
        ('ring', None, None)
    """
    found = BACKENDS.find(backend)
    return None if found is None else found.facts.algorithm


def run_on(link: Link, algorithm: str) -> Link:
    """The link, which says that it is of this algorithm, whatever its backend declares.

    Raises:
        UsageError: there is no such algorithm, or it has no such option.
    """
    parse_algorithm(algorithm)
    return msgspec.structs.replace(link, extra={**link.extra, GIVEN: algorithm})


def algorithm_by(link: Link) -> str:
    """The algorithm that a link was said to be of (`run_on`), else that of its backend, as text.

    Raises:
        UsageError: see `algorithm_of`.

    Example:
        >>> link = Link(backend="gloo", num_workers=2, latency_s=0, seconds_per_byte=0)
        >>> algorithm_by(link), algorithm_by(run_on(link, "tree"))
        ('ring', 'tree')
    """
    given = link.extra.get(GIVEN)
    return given if isinstance(given, str) else algorithm_of(link.backend)


def sums_on_servers(link: Link) -> bool:
    """Whether the link's algorithm (`algorithm_by`) sums on parameter servers.

    A backend that is not known here, or declares no algorithm, counts as an all-reduce.

    Example:
        >>> link = Link(backend="zmq-ps", num_workers=2, latency_s=0, seconds_per_byte=0)
        >>> sums_on_servers(link)
        True
    """
    found = link.extra.get(GIVEN) or declared_algorithm(link.backend)
    return isinstance(found, str) and isinstance(parse_algorithm(found), Server)


def _rounds(num_workers: int) -> tuple[int, int]:
    """Rounds of the power of two at or below, and 1 if ranks are left over."""
    rounds = num_workers.bit_length() - 1
    return rounds, int(num_workers > 1 << rounds)


def round_phases_s(
    each: RoundCost, link: Link, algorithm: Algorithm, message_bytes: float = 0.0
) -> tuple[float, float]:
    """Start-up and transfer seconds of one round of a compressed exchange, alone on the link.

    A sum of M bytes among n workers takes a + b M, with a = startups(n) alpha and b = transfers(n)
    beta. Other forms use the same alpha and beta:

    | form | start-ups | bytes through the busiest interface, one direction |
    |---|---|---|
    | sum of M | startups(n) | transfers(n) M |
    | gather of m each, ring and others | 2 (n - 1), the first half for the sizes | (n - 1) m |
    | gather of m each, all at once (m <= `at_once_bytes` of a ring) | n - 1 | (n - 1) m |
    | gather of m each, relayed by S servers | 2 | (w + max((n - 1) (S - 1) / S, (n - 1) w)) m |
    | gather of m each, one server merges into m' | 2 | v (m + m') |
    | the same of a message that is cut over S servers | 2 | max(w, v / S) (m + m') |
    | deliver of m in all, ring and others | 2 (n - 1), the first half for the sizes | m |
    | deliver of m in all, relayed by S servers | 2 | 2 w m |

    Servers: w = max(1, n / S) dedicated, (n - 1) / S colocated; v = n dedicated, n - 1 colocated,
    as the server that owns a key, or a range of it, serves all workers. Ranges have as many
    elements each; that they have as many selected ones, too, is an assumption: large values are
    spread evenly.

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
