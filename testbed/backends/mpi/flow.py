"""Pure planning of segmented rings and chains: who sends which span when; no MPI, no tensors.

A rank's part in a ring is a stream: spans that it sends unasked, then arrivals in a fixed order,
each of which may be added to the rank's own values and may be passed on to the right. What rank r
sends as its j-th message is what its right neighbour receives as its j-th arrival.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Span = tuple[int, int]  # begin and end, in elements


@dataclass(frozen=True, slots=True)
class Arrival:
    """One segment that comes from the left neighbour.

    Attributes:
        begin: first element of the span that it belongs to.
        end: one past the last element.
        reduce: it is added to the span; otherwise it replaces the span.
        forward: the span is then sent on to the right.
        after: index of the own send that must be complete before the span may be overwritten.
    """

    begin: int
    end: int
    reduce: bool
    forward: bool
    after: int | None = None


@dataclass(frozen=True, slots=True)
class Flow:
    """One rank's part in a ring or chain.

    Attributes:
        left: rank from which everything comes.
        right: rank to which everything goes.
        first: spans that are sent without waiting for anything.
        arrivals: what comes in, in order.
    """

    left: int
    right: int
    first: tuple[Span, ...] = ()
    arrivals: tuple[Arrival, ...] = ()

    @property
    def sends(self) -> tuple[Span, ...]:
        """All spans that this rank sends, in order."""
        return self.first + tuple((a.begin, a.end) for a in self.arrivals if a.forward)


def cut(span: Span, segment: int) -> tuple[Span, ...]:
    """A span in pieces of at most `segment` elements; nothing for an empty span.

    Example:
        >>> cut((3, 10), 4)
        ((3, 7), (7, 10))
    """
    begin, end = span
    return tuple((b, min(b + segment, end)) for b in range(begin, end, segment))


def ring_flow(
    ring: Sequence[int],
    position: int,
    chunks: Sequence[tuple[Span, ...]],
    *,
    fold: bool = True,
    spread: bool = True,
) -> Flow:
    """The two sweeps of a ring all-reduce, or one of them, as the rank at `position` sees them.

    In hop s of the fold, position p receives chunk p - s - 2 and adds it, so that after n - 1 hops
    it owns the sum of chunk p; in hop s of the spread it receives the finished chunk p - s - 1.
    Each chunk travels 2 (n - 1) times, so all ranks together send 2 (n - 1) times the tensor.

    Args:
        ring: ranks in ring order.
        position: this rank's place in `ring`.
        chunks: the segments of the chunk that each position owns; equal on all ranks.
        fold: sum the chunks at their owners.
        spread: bring the owners' chunks to all.

    Example:
        >>> flow = ring_flow([0, 1], 0, [((0, 2),), ((2, 4),)])
        >>> flow.first, [(a.begin, a.reduce, a.forward, a.after) for a in flow.arrivals]
        (((2, 4),), [(0, True, True, None), (2, False, False, 0)])

    Source:
        Patarasuk and Yuan, 2009, J. Parallel Distrib. Comput.; the hops are cut into segments as
        in Open MPI's segmented ring, but a segment is passed on as soon as it has been added.
    """
    n = len(ring)
    left, right = ring[position - 1], ring[(position + 1) % n]
    if n == 1:
        return Flow(left, right)
    hops = [((position - s - 2) % n, True) for s in range(n - 1)] if fold else []
    hops += [((position - s - 1) % n, False) for s in range(n - 1)] if spread else []
    first = chunks[(position - 1) % n] if fold else chunks[position]
    sent = {span: index for index, span in enumerate(first)}
    arrivals: list[Arrival] = []
    num_sent = len(first)
    for hop, (chunk, reduce) in enumerate(hops):
        forward = hop < len(hops) - 1
        for span in chunks[chunk]:
            after = None if reduce else sent.get(span)
            arrivals.append(Arrival(*span, reduce=reduce, forward=forward, after=after))
            if forward:
                sent[span] = num_sent
                num_sent += 1
    return Flow(left, right, tuple(first), tuple(arrivals))


def chain_flow(rank: int, size: int, root: int, spans: tuple[Span, ...]) -> Flow:
    """A broadcast from `root` along the chain root, root + 1, ..., segment by segment.

    Example:
        >>> chain_flow(1, 3, 0, ((0, 5),)).arrivals[0].forward
        True
    """
    distance = (rank - root) % size
    left, right = (rank - 1) % size, (rank + 1) % size
    if distance == 0:
        return Flow(left, right, spans if size > 1 else ())
    forward = distance < size - 1
    return Flow(
        left, right, (), tuple(Arrival(*span, reduce=False, forward=forward) for span in spans)
    )
