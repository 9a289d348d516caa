"""A measured link at other numbers of workers, by the constants of the algorithm it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Any, TypeVar

import msgspec

from testbed.base.errors import UsageError
from testbed.base.link import PROCESSOR_TIMES, Link, Piece
from testbed.base.trace import Trace
from testbed.prediction.algorithms import Algorithm, Ring

T = TypeVar("T", Link, Piece)


@dataclass(frozen=True)
class Node:
    """Several ranks of one machine that share its network interface.

    Attributes:
        link: measured between all ranks of one node, its `num_workers` g.
    """

    link: Link

    @property
    def num_ranks(self) -> int:
        """Ranks of a full node, g."""
        return self.link.num_workers


@dataclass(frozen=True)
class HeldOut:
    """A measured link, and what another one predicts for its number of workers.

    Attributes:
        measured: the link.
        predicted: from the other link, at the same number of workers.
    """

    measured: Link
    predicted: Link

    @property
    def latency_error(self) -> float:
        """Predicted over measured start-up, less 1."""
        return _relative(self.predicted.latency_s, self.measured.latency_s)

    @property
    def seconds_per_byte_error(self) -> float:
        """Predicted over measured time per byte, less 1."""
        return _relative(self.predicted.seconds_per_byte, self.measured.seconds_per_byte)


def _relative(predicted: float, measured: float) -> float:
    if measured == 0:
        return 0.0 if predicted == 0 else inf
    return predicted / measured - 1


def extrapolate(
    link: Link, algorithm: Algorithm, num_workers: int, node: Node | None = None
) -> Link:
    """The link between another number of workers on the same network.

        a(n) = a(n0) startups(n) / startups(n0),   b(n) = b(n0) transfers(n) / transfers(n0)

    With nodes of g ranks the algorithm runs between N = n / g nodes, in the middle of a fold and a
    spread inside each node, which `node.link` measured as one sum:

        a(n) = a_node + A(N),   b(n) = b_node + B(N),   A, B from a(n0) - a_node, b(n0) - b_node

    A node sends what its ranks sum: its interface carries transfers(N) M, for a ring
    2 (N - 1) / N M where a ring through all ranks would put 2 (n - 1) / n M on it. Within one node
    the node's own link is scaled as a ring. Pieces are scaled alike; the law of simultaneous
    messages is kept, and so is the processor time of a message.

    Args:
        link: measured, with two workers or more; with `node` across two nodes or more.
        algorithm: that the link's backend runs.
        num_workers: n >= 1.
        node: where several ranks share a machine.

    Raises:
        UsageError: the link cannot be taken apart so.

    Example:
        >>> link = Link(backend="x", num_workers=16, latency_s=9.08e-4, seconds_per_byte=7.4e-10)
        >>> at_8 = extrapolate(link, Ring(), 8)
        >>> f"{at_8.latency_s:.3g} {at_8.seconds_per_byte:.3g}"
        '0.000424 6.91e-10'
    """
    if num_workers < 1:
        raise UsageError(f"number of workers is {num_workers}; expected 1 or more")
    if num_workers == 1:
        return msgspec.structs.replace(link, num_workers=1)
    if link.num_workers < 2:
        raise UsageError(
            f"the link was measured with {link.num_workers} worker; expected 2 or more: one worker "
            "tells nothing of the network"
        )
    if node is None:
        return _scaled(link, algorithm, link.num_workers, num_workers, num_workers)
    if num_workers <= node.num_ranks:
        return _scaled(node.link, Ring(), node.num_ranks, num_workers, num_workers)
    between = _between_nodes(link, node)
    num_nodes = ceil(num_workers / node.num_ranks)
    measured_nodes = ceil(link.num_workers / node.num_ranks)
    scaled = _scaled(between, algorithm, measured_nodes, num_nodes, num_workers)
    inside = node.link
    return each_piece(scaled, lambda a, b: (a + inside.latency_s, b + inside.seconds_per_byte))


def hold_out(
    link: Link, algorithm: Algorithm, measured: Sequence[Link], node: Node | None = None
) -> list[HeldOut]:
    """The extrapolation of one link beside links that were measured.

    Raises:
        UsageError: see `extrapolate`.
    """
    return [HeldOut(m, extrapolate(link, algorithm, m.num_workers, node)) for m in measured]


def at_bandwidth(link: Link, factor: float, node: Node | None = None) -> Link:
    """The same link with so many times the network's bandwidth; start-ups stay.

        b' = b_node + (b - b_node) / f,   b_node = 0 without nodes

    A factor below 1 is also what the slowest of unequal interfaces does to an algorithm whose
    busiest interface it is (in a ring any): all wait for it. What several ranks of a node sum in
    its memory crosses no interface, and a link within one node stays as it is.

    Args:
        link: measured or extrapolated.
        factor: f > 0.
        node: where several ranks share a machine, as `extrapolate` has it.

    Raises:
        UsageError: the factor is not finite and above 0.

    Example:
        >>> node = Node(Link(backend="x", num_workers=4, latency_s=1e-5, seconds_per_byte=1e-10))
        >>> link = Link(backend="x", num_workers=16, latency_s=9e-4, seconds_per_byte=7e-10)
        >>> at_bandwidth(link, 0.5).seconds_per_byte, at_bandwidth(link, 0.5, node).seconds_per_byte
        (1.4e-09, 1.3e-09)
    """
    if not 0 < factor < inf:
        raise UsageError(f"bandwidth factor is {factor:g}; expected above 0 and finite")
    if node is None:
        return each_piece(link, lambda a, b: (a, b / factor))
    if link.num_workers <= node.num_ranks:
        return link

    def varied(latency_s: float, seconds_per_byte: float) -> tuple[float, float]:
        inside = min(node.link.seconds_per_byte, seconds_per_byte)
        return latency_s, inside + (seconds_per_byte - inside) / factor

    return each_piece(link, varied)


def slowed(trace: Trace, factor: float) -> Trace:
    """The trace of a worker whose compute takes `factor` times as long; all others wait for it.

    Raises:
        UsageError: the factor is not finite, or below 1.
    """
    if not 1 <= factor < inf:
        raise UsageError(
            f"the slowest worker's factor is {factor:g}; expected 1 or more and finite"
        )
    return trace.stretched(factor)


def _between_nodes(link: Link, node: Node) -> Link:
    """What is left of a link across nodes without the sum inside each node."""
    inside = node.link
    if link.num_workers <= node.num_ranks:
        raise UsageError(
            f"the link was measured with {link.num_workers} workers, all in one node of "
            f"{node.num_ranks} ranks; expected a link across nodes"
        )

    def left_over(latency_s: float, seconds_per_byte: float) -> tuple[float, float]:
        left = (latency_s - inside.latency_s, seconds_per_byte - inside.seconds_per_byte)
        if min(left) >= 0:
            return left
        raise UsageError(
            f"a sum inside a node ({inside.latency_s:g} s + {inside.seconds_per_byte:g} s/B) costs "
            f"more than one across nodes ({link.latency_s:g} s + {link.seconds_per_byte:g} s/B); "
            "expected less; measure both with the same backend"
        )

    return each_piece(link, left_over)


def over_nodes(link: Link, algorithm: Algorithm, node: Node) -> Link:
    """Nominal numbers, which are of an algorithm through all ranks, as it runs between nodes.

        a = a_node + startups(N) latency,   b = b_node + transfers(N) 8 / rate,   N = n / g

    Args:
        link: nominal, among n workers; of one node's alone it stays as it is.
        algorithm: that it was made with.
        node: of g ranks.

    Example:
        >>> node = Node(Link(backend="x", num_workers=4, latency_s=1e-5, seconds_per_byte=1e-10))
        >>> flat = Link(backend="x", num_workers=16, latency_s=30e-6, seconds_per_byte=1.875e-9)
        >>> link = over_nodes(flat, Ring(), node)
        >>> f"{link.latency_s:.3g} {link.seconds_per_byte:.3g}"
        '1.6e-05 1.6e-09'
    """
    n, inside = link.num_workers, node.link
    if n <= node.num_ranks:
        return link
    between = _scaled(link, algorithm, n, ceil(n / node.num_ranks), n)
    return each_piece(between, lambda a, b: (a + inside.latency_s, b + inside.seconds_per_byte))


def run_by(link: Link, measured: Algorithm, other: Algorithm) -> Link:
    """The link if another algorithm ran over the same network among as many workers.

        a' = a startups'(n) / startups(n),   b' = b transfers'(n) / transfers(n)

    Args:
        link: with two workers or more.
        measured: that it was measured with.
        other: that runs instead.

    Example:
        >>> link = Link(backend="x", num_workers=4, latency_s=1e-4, seconds_per_byte=1.5e-9)
        >>> from testbed.prediction.algorithms import Tree
        >>> f"{run_by(link, Ring(), Tree()).seconds_per_byte:.3g}"
        '2e-09'
    """
    n = link.num_workers
    startups = other.startups(n) / measured.startups(n)
    transfers = other.transfers(n) / measured.transfers(n)
    return each_piece(link, lambda a, b: (a * startups, b * transfers))


def _scaled(link: Link, algorithm: Algorithm, old: int, new: int, num_workers: int) -> Link:
    startups = algorithm.startups(new) / algorithm.startups(old)
    transfers = algorithm.transfers(new) / algorithm.transfers(old)
    found = each_piece(link, lambda a, b: (a * startups, b * transfers))
    return msgspec.structs.replace(found, num_workers=num_workers)


def each_piece(link: Link, change: Callable[[float, float], tuple[float, float]]) -> Link:
    """The link with start-up and time per byte changed, in each piece too."""

    def changed(part: T) -> T:
        latency_s, seconds_per_byte = change(part.latency_s, part.seconds_per_byte)
        return msgspec.structs.replace(part, latency_s=latency_s, seconds_per_byte=seconds_per_byte)

    pieces = tuple(map(changed, link.pieces or ())) or None
    return msgspec.structs.replace(changed(link), pieces=pieces)


# A link measured on one emulated cluster, converted to another.


@dataclass(frozen=True)
class Setting:
    """The properties of an emulated cluster on which a message's time depends.

    Attributes:
        rate_bps: of the slowest link, as emulated.
        dilation: how many times slower than there everything happens here.
        latency_s: that latency adds to every exchange, as emulated.
        cpu_policy: under which its nodes share this machine's cores.
        cores: whether any node's threads may be on any of them (`shared`) or each node keeps to its
            share (`pinned`).
        awake: whether idle cores polled instead of halting.
        nodes_per_core: how many nodes share a core, at least 1; None: not known.
    """

    rate_bps: float
    dilation: float = 1.0
    latency_s: float = 0.0
    cpu_policy: str = "batch"
    cores: str = "pinned"
    awake: bool = True
    nodes_per_core: float | None = None

    def __post_init__(self) -> None:
        if not (self.rate_bps > 0 and self.dilation > 0 and self.latency_s >= 0):
            raise UsageError(
                f"an emulated cluster has rate {self.rate_bps:g} bit/s, dilation "
                f"{self.dilation:g}, latency {self.latency_s:g} s; expected rate and dilation "
                "above 0, latency 0 or more"
            )


def carried(link: Link, measured: Setting, asked: Setting, wire_s_per_byte: float = inf) -> Link:
    """A link measured on one emulated cluster as it is on another, in the other one's time.

        a' = (a - L) D / D' + L',   b' = w R / R' + (b - w) D / D' c' / c,   w <= b

    R, D, L, c are rate, dilation, latency and nodes per core where it was measured, R', D', L', c'
    those asked for. Of the time of a byte the slowest link needs w; the rest is what the hosts
    need, which do not grow slower with the dilation, but share this machine's cores. A start-up is
    theirs, too, and the latency; so are processor times, o' = o D / D'. Slow-downs stay.

    Args:
        link: a in s, b in s/byte.
        measured: where that was.
        asked: where it is wanted.
        wire_s_per_byte: w, what the network alone needs there; infinite: all of b.

    Raises:
        UsageError: their nodes share this machine's cores in different ways.

    Example:
        >>> link = Link(backend="x", num_workers=4, latency_s=1e-4, seconds_per_byte=1.3e-9)
        >>> there = carried(link, Setting(10e9, dilation=10), Setting(5e9, dilation=20), 1.2e-9)
        >>> f"{there.latency_s:.3g} {there.seconds_per_byte:.3g}"
        '5e-05 2.45e-09'
    """
    theirs, ours = _sharing(measured), _sharing(asked)
    if theirs != ours:
        raise UsageError(
            f"the link was measured under {theirs} and the cluster has {ours}: what hosts need for "
            f"a message differs; measure the link again, or add {theirs} to --cluster, where this "
            "machine's cores allow it"
        )

    def start_up_s(latency_s: float) -> float:
        hosts_s = max(0.0, latency_s - measured.latency_s)
        return hosts_s * measured.dilation / asked.dilation + asked.latency_s

    here, there = asked.nodes_per_core, measured.nodes_per_core
    crowd = 1.0 if here is None or there is None else here / there

    def byte_s(seconds_per_byte: float) -> float:
        wire_s = min(wire_s_per_byte, seconds_per_byte)
        hosts_s = (seconds_per_byte - wire_s) * measured.dilation / asked.dilation * crowd
        return wire_s * measured.rate_bps / asked.rate_bps + hosts_s

    found = each_piece(link, lambda a, b: (start_up_s(a), byte_s(b)))
    times = _processor_times(link, measured.dilation / asked.dilation)
    return msgspec.structs.replace(found, **times)


def _sharing(setting: Setting) -> str:
    awake = "auto" if setting.awake else "no"
    return f"cpu_policy={setting.cpu_policy},cores={setting.cores},awake={awake}"


def setting_of(record: Mapping[str, Any], num_startups: float | None = None) -> Setting:
    """The setting in the record that a link or a cell keeps of its cluster (`cluster`).

    Records without CPU policy, cores or `cores_awake` are older than these options: their clusters
    had the usual policy, shared cores, and cores that halted when idle.

    Args:
        record: of the cluster.
        num_startups: messages of an exchange that wait for each other, each for the latency where
            packets are delayed; None = unknown.

    Raises:
        UsageError: packets are delayed there, and it is not known how often an exchange waits.

    Example:
        >>> ways = {"node": 1, "up_bps": 1e9, "down_bps": 5e8}
        >>> setting = setting_of({"links": [ways], "dilation": 10.0, "latency": "none"})
        >>> setting.rate_bps, setting.cpu_policy, setting.cores, setting.awake
        (500000000.0, 'other', 'shared', False)
    """
    latency_s = 0.0
    if record.get("latency") in ("netem", "relay"):
        if num_startups is None:
            raise UsageError(
                "the link was measured where packets were delayed, so that what hosts need for a "
                "message is not known apart; give one that was measured without latency, or leave "
                "out --link: it is measured where it is used"
            )
        latency_s = num_startups * record["latency_s"]
    elif record.get("latency") == "injected":
        latency_s = record["latency_s"]
    shares = Counter(core for cores in record.get("node_cores") or () for core in cores)
    return Setting(
        min(min(link["up_bps"], link["down_bps"]) for link in record["links"]),
        record["dilation"],
        latency_s,
        record.get("cpu_policy", "other"),
        record.get("cores", "shared"),
        record.get("cores_awake") == "yes",
        float(max(shares.values())) if shares else None,
    )


def stretched_link(link: Link, factor: float) -> Link:
    """The link with every time multiplied, as by the dilation of an emulated cluster.

    The figures of its fit (`Link.extra["fit"]`) go with it; slow-downs are ratios and stay.

    Example:
        >>> slow = Link(backend="x", num_workers=2, latency_s=1e-3, seconds_per_byte=8e-9)
        >>> stretched_link(slow, 0.5).time_s(1000) == slow.time_s(1000) / 2
        True
    """
    extra = dict(link.extra)
    if "fit" in extra:
        extra["fit"] = {**extra["fit"], "sizes": [_row(r, factor) for r in extra["fit"]["sizes"]]}
    if "missing_s" in extra:
        extra["missing_s"] = [time_s * factor for time_s in extra["missing_s"]]
    stretched = each_piece(link, lambda a, b: (a * factor, b * factor))
    return msgspec.structs.replace(stretched, extra=extra, **_processor_times(link, factor))


def _processor_times(link: Link, factor: float) -> dict[str, float]:
    return {name: getattr(link, name) * factor for name in PROCESSOR_TIMES}


def _row(row: dict[str, Any], factor: float) -> dict[str, Any]:
    return {**row, "time_s": row["time_s"] * factor, "fitted_s": row["fitted_s"] * factor}
