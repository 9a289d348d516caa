"""A measured link at other numbers of workers, by the constants of the algorithm it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, inf

import msgspec

from testbed.errors import UsageError
from testbed.prediction.algorithms import Algorithm, Ring
from testbed.prediction.link import Link, Piece
from testbed.prediction.trace import Trace


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
    """What the extrapolation says of a link that was measured too.

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
    messages is kept.

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
    if link.num_workers < 2:
        raise UsageError(
            f"the link was measured with {link.num_workers} worker; expected 2 or more: one worker "
            "tells nothing of the network"
        )
    if num_workers == 1:
        return msgspec.structs.replace(link, num_workers=1)
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
    """How far the extrapolation of one link is from others that were measured.

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
    """The trace of the worker whose compute takes so many times as long: all wait for it.

    Raises:
        UsageError: the factor is not finite, or below 1.
    """
    if not 1 <= factor < inf:
        raise UsageError(
            f"the slowest worker's factor is {factor:g}; expected 1 or more and finite"
        )
    return with_compute(trace, lambda _: factor, lambda _: factor)


def with_compute(
    trace: Trace, forward: Callable[[int], float], backward: Callable[[int], float]
) -> Trace:
    """The trace with each tensor's times multiplied by factors that depend on its index."""
    tensors = tuple(
        msgspec.structs.replace(
            tensor,
            forward_s=tensor.forward_s * forward(index),
            backward_s=tensor.backward_s * backward(index),
        )
        for index, tensor in enumerate(trace.tensors)
    )
    return msgspec.structs.replace(trace, tensors=tensors)


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


def _scaled(link: Link, algorithm: Algorithm, old: int, new: int, num_workers: int) -> Link:
    startups = algorithm.startups(new) / algorithm.startups(old)
    transfers = algorithm.transfers(new) / algorithm.transfers(old)
    found = each_piece(link, lambda a, b: (a * startups, b * transfers))
    return msgspec.structs.replace(found, num_workers=num_workers)


def each_piece(link: Link, change: Callable[[float, float], tuple[float, float]]) -> Link:
    """The link with start-up and time per byte changed, in each piece too."""
    pieces = []
    for piece in link.pieces or ():
        latency_s, seconds_per_byte = change(piece.latency_s, piece.seconds_per_byte)
        pieces.append(
            Piece(max_bytes=piece.max_bytes, latency_s=latency_s, seconds_per_byte=seconds_per_byte)
        )
    latency_s, seconds_per_byte = change(link.latency_s, link.seconds_per_byte)
    return msgspec.structs.replace(
        link,
        latency_s=latency_s,
        seconds_per_byte=seconds_per_byte,
        pieces=tuple(pieces) or None,
    )
