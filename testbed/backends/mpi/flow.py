"""Pure planning of rings, chains and recursive doubling: who sends which span when; no MPI.

A rank's part in a ring is a stream: spans that it sends unasked, then arrivals in a fixed order,
each of which may be added to the rank's own values and may be passed on to the right. What rank r
sends as its j-th message is what its right neighbour receives as its j-th arrival.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from testbed.base.errors import UsageError
from testbed.base.types import Op, shard_bounds

Range = tuple[int, int]  # begin and end, in elements


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
    first: tuple[Range, ...] = ()
    arrivals: tuple[Arrival, ...] = ()

    @property
    def sends(self) -> tuple[Range, ...]:
        """All spans that this rank sends, in order."""
        return self.first + tuple((a.begin, a.end) for a in self.arrivals if a.forward)


def cut(span: Range, segment: int) -> tuple[Range, ...]:
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
    chunks: Sequence[tuple[Range, ...]],
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

    Reference:
        Patarasuk and Yuan, 2009, J. Parallel Distrib. Comput. Departs: the hops are cut into
        segments as in Open MPI's segmented ring, and a segment is passed on as soon as it has been
        added.
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


def chain_flow(rank: int, size: int, root: int, spans: tuple[Range, ...]) -> Flow:
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


# Sums inside hosts, between hosts, inside hosts again; also the flat ring.
#
# With h hosts of g ranks, fold and spread inside a host move (g - 1) / g of the tensor over its
# memory, and each of the g rings between the hosts moves only 1/g of the tensor over the network.
# Chunks are lists of shards, so that rank r ends a fold owning shard r, as in a flat ring.

Groups = tuple[tuple[int, ...], ...]  # ranks of each host, in rank order


def groups_of(hosts: Sequence[str], group_size: int | None) -> Groups:
    """The ranks of each host, or runs of `group_size` consecutive ranks.

    Raises:
        UsageError: the groups differ in size; two levels then have no equal shards to exchange.

    Example:
        >>> groups_of(["a", "b", "a", "b"], None), groups_of(["a"] * 4, 2)
        (((0, 2), (1, 3)), ((0, 1), (2, 3)))
    """
    names = hosts if group_size is None else [f"group {r // group_size}" for r in range(len(hosts))]
    members: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        members.setdefault(name, []).append(rank)
    if len({len(ranks) for ranks in members.values()}) > 1:
        given = ", ".join(f"{name}: {len(ranks)}" for name, ranks in members.items())
        raise UsageError(
            f"levels=2 was given with groups of unequal size ({given}); expected the same number "
            "of ranks in each; start as many ranks on every host or use levels=1"
        )
    return tuple(tuple(ranks) for ranks in members.values())


def flat_groups(size: int) -> Groups:
    """All ranks in one group: a single ring."""
    return (tuple(range(size)),)


def sum_flows(
    groups: Groups, rank: int, num_elements: int, segment: int, op: Op
) -> tuple[Flow, ...]:
    """The rings that a rank goes through, one after the other, for a sum or one half of it.

    Args:
        groups: ranks of each host; a single group is a flat ring.
        rank: this rank.
        num_elements: elements of the tensor.
        segment: elements of a segment.
        op: ALL_REDUCE, FOLD or SPREAD.
    """
    size = sum(map(len, groups))
    bounds = shard_bounds(num_elements, size)
    shards = [cut((bounds[r], bounds[r + 1]), segment) for r in range(size)]
    host = next(h for h, ranks in enumerate(groups) if rank in ranks)
    local = groups[host].index(rank)
    inside = groups[host]
    between = [ranks[local] for ranks in groups]
    inside_chunks = [
        _together(shards, [ranks[position] for ranks in groups]) for position in range(len(inside))
    ]
    between_chunks = [shards[r] for r in between]
    fold, spread = op != Op.SPREAD, op != Op.FOLD
    flows: list[Flow] = []
    if len(groups) == 1:
        return (ring_flow(inside, local, inside_chunks, fold=fold, spread=spread),)
    if fold:
        flows.append(ring_flow(inside, local, inside_chunks, spread=False))
    flows.append(ring_flow(between, host, between_chunks, fold=fold, spread=spread))
    if spread:
        flows.append(ring_flow(inside, local, inside_chunks, fold=False))
    return tuple(flows)


def _together(shards: Sequence[tuple[Range, ...]], ranks: Sequence[int]) -> tuple[Range, ...]:
    return tuple(span for rank in ranks for span in shards[rank])


# Recursive doubling, log2(n) exchanges of the whole tensor, for sums where latency dominates: the
# partners of a rank, and up to which size it is the faster way.
#
# With n not a power of two, the first 2 (n - p) ranks (p the largest power of two below n) pair up
# before: the even one gives its values to the odd one and gets the result from it at the end.


@dataclass(frozen=True, slots=True)
class Doubling:
    """One rank's part.

    Attributes:
        partners: ranks with which it exchanges and adds, in order.
        giver: the rank whose values it adds first and that gets the result at the end.
        taker: the rank to which it gives its values; it then only waits for the result.
    """

    partners: tuple[int, ...] = ()
    giver: int | None = None
    taker: int | None = None

    @property
    def num_received(self) -> int:
        """Messages that must be added, each in a slot of its own."""
        return len(self.partners) + (self.giver is not None)


def plan_doubling(rank: int, size: int) -> Doubling:
    """The ranks with which a rank exchanges.

    Example:
        >>> plan_doubling(1, 3)
        Doubling(partners=(2,), giver=0, taker=None)
        >>> plan_doubling(0, 3).taker, plan_doubling(2, 4).partners
        (1, (3, 0))

    Reference:
        Thakur, Rabenseifner and Gropp, 2005, Int. J. High Perform. Comput. Appl.
    """
    power = 1 << (size.bit_length() - 1)
    extra = size - power
    if rank < 2 * extra and rank % 2 == 0:
        return Doubling(taker=rank + 1)
    place = rank // 2 if rank < 2 * extra else rank - extra
    others = [place ^ (1 << bit) for bit in range(power.bit_length() - 1)]
    partners = tuple(2 * other + 1 if other < extra else other + extra for other in others)
    return Doubling(partners, giver=rank - 1 if rank < 2 * extra else None)


def choose_switch(timings: Iterable[tuple[int, float, float]], at_least: int = 4096) -> int:
    """The largest size below which doubling was never slower.

    Args:
        timings: (num_bytes, seconds by doubling, seconds by ring), sizes ascending; none is taken
            after the first at which the ring is faster.
        at_least: bytes up to which doubling is taken unmeasured: there only the number of
            messages counts, log2(n) against 2 (n - 1).

    Example:
        >>> choose_switch([(16384, 3e-5, 4e-5), (65536, 9e-5, 5e-5)])
        16384
    """
    best = at_least
    for num_bytes, doubling_s, ring_s in timings:
        if doubling_s > ring_s:
            break
        best = num_bytes
    return best
