"""A measured link at other numbers of workers, by the constants of the algorithm it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import TypeVar

import msgspec

from testbed.base.errors import UsageError
from testbed.base.link import Link, Piece
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
