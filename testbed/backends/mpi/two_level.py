"""Pure planning of sums inside hosts, between hosts, inside hosts again; also the flat ring.

With h hosts of g ranks, fold and spread inside a host move (g - 1) / g of the tensor over its
memory, and each of the g rings between the hosts moves only 1/g of the tensor over the network.
Chunks are lists of shards, so that rank r ends a fold owning shard r, as in a flat ring.
"""

from __future__ import annotations

from collections.abc import Sequence

from testbed.backends.mpi.flow import Flow, Span, cut, ring_flow
from testbed.errors import UsageError
from testbed.nouns import Verb, shard_bounds

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
    groups: Groups, rank: int, num_elements: int, segment: int, verb: Verb
) -> tuple[Flow, ...]:
    """The rings that a rank goes through, one after the other, for SUM, FOLD or SPREAD.

    Args:
        groups: ranks of each host; a single group is a flat ring.
        rank: this rank.
        num_elements: elements of the tensor.
        segment: elements of a segment.
        verb: SUM, FOLD or SPREAD.
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
    fold, spread = verb != Verb.SPREAD, verb != Verb.FOLD
    flows: list[Flow] = []
    if len(groups) == 1:
        return (ring_flow(inside, local, inside_chunks, fold=fold, spread=spread),)
    if fold:
        flows.append(ring_flow(inside, local, inside_chunks, spread=False))
    flows.append(ring_flow(between, host, between_chunks, fold=fold, spread=spread))
    if spread:
        flows.append(ring_flow(inside, local, inside_chunks, fold=False))
    return tuple(flows)


def _together(shards: Sequence[tuple[Span, ...]], ranks: Sequence[int]) -> tuple[Span, ...]:
    return tuple(span for rank in ranks for span in shards[rank])
