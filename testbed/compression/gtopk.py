"""gTop-k: the global top-k by pairwise merging, in about log2 P rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from testbed.base.parts import PUBLISHED, Part
from testbed.base.types import Op
from testbed.compression.common import count_of, require_ratio, require_values
from testbed.compression.protocol import (
    ByteRange,
    Claims,
    Context,
    Conversation,
    Exchanged,
    Round,
    State,
)
from testbed.compression.selection import largest
from testbed.compression.sparse import pack_sparse, sparse_bytes, unpack_sparse
from testbed.compression.topk import zeroing

Selection = tuple[torch.Tensor, torch.Tensor]  # ascending indices [k], values [k]


@dataclass(frozen=True)
class GTopK:
    """Pairs of ranks exchange their k elements, add them and keep the k largest, in log2 P rounds.

        round r: rank i exchanges with rank i XOR 2^r;  kept <- topk(kept + received, k)

    Ranks beyond the largest power of two first hand their selection to one below it and get the
    result at the end. All ranks end with the same k elements; in general they are not the k largest
    of the sum, as an element that is dropped in an early round stays dropped.

    Bytes: log2 P times min(k e + index_bytes(n, k), n e) for a power of two, see `sparse`;
    otherwise at most one payload more.

    Attributes:
        ratio: share of elements, 0 < ratio <= 1.
        residual: which local elements count as sent. `published`: those whose index is in the
            result, which loses a value that was dropped in an early round on this rank's path while
            its index survived on another. `conserving`: those whose index was never dropped on this
            rank's path. A value that a rank beyond the power of two handed on and that was dropped
            is kept by the rank that received it.

    Raises:
        UsageError: a ratio outside of that.

    Example:
        >>> from testbed.compression.lockstep import Lockstep
        >>> job = Lockstep(GTopK(0.3), num_workers=4)
        >>> values = [[9, 0, 1, 0, 4, 0], [0, 8, 0, 3, -5, 0],
        ...           [2, 0, 0, 7, 0, -6], [0, -7, 0, 5, 1, 0]]
        >>> job.exchange(list(torch.tensor(values, dtype=torch.float32)))[0].mean
        tensor([2.2500, 0.0000, 0.0000, 3.0000, 0.0000, 0.0000])

    Reference:
        Shi et al., 2019, ICDCS (gTop-k). Departs: `conserving` is the default; any number of ranks.
        Each round is an all-to-all in which a rank has something for its partner alone: bytes are
        the paper's, 2 k log2 P, start-ups are those of an all-to-all for each of the log2 P rounds,
        not one each. Keeps nothing by itself: the paper's residual is `ef+gtopk`.
    """

    ratio: float = 0.01
    residual: Literal["conserving", "published"] = "conserving"

    def __post_init__(self) -> None:
        require_ratio("gtopk", self.ratio)

    @property
    def claims(self) -> Claims:
        """See `Compressor.claims`."""
        return Claims(mean_of_sent=self.residual == "conserving")

    def exchange(self, values: torch.Tensor, state: State, context: Context) -> Conversation:
        """See `Compressor.exchange`."""
        require_values(values, context)
        count = count_of(self.ratio, values.numel())
        own = largest(values, count)
        held: Selection = (own, values[own])
        dropped = own[:0]
        handed: Selection = (own[:0], values[:0])
        swaps = swaps_of(context.rank, context.num_workers)
        for number, swap in enumerate(swaps, 1):
            arrived = yield _swap(held, swap, values, context, last=number == len(swaps))
            if swap.receives_from is None:
                continue
            other = unpack_sparse(arrived.parts[swap.receives_from], values)
            if swap.is_result:
                kept = other[1] != 0  # a dense payload names those that are not in it, too
                held = (other[0][kept], other[1][kept])
                continue
            if swap.sends_to is None:
                handed = other
            held, gone = _merged(held, other, count)
            dropped = torch.cat([dropped, gone])
        mean = torch.zeros_like(values)
        mean[held[0]] = held[1] / context.num_workers
        if self.residual == "published":
            sent = own[torch.isin(own, held[0])]
            return Exchanged(mean, state, zeroing(sent))
        lost = torch.isin(handed[0], dropped)
        returned = (handed[0][lost], handed[1][lost])
        return Exchanged(mean, state, _conserving(own[~torch.isin(own, dropped)], returned))

    def payload_bytes(self, num_elements: int, element_bytes: int, context: Context) -> ByteRange:
        """See `Compressor.payload_bytes`."""
        count = count_of(self.ratio, num_elements)
        size = sparse_bytes(num_elements, count, element_bytes)
        swaps = swaps_of(context.rank, context.num_workers)
        num_sent = sum(swap.sends_to is not None for swap in swaps)
        return ByteRange(num_sent * size, num_sent * size)


@dataclass(frozen=True)
class Swap:
    """What one rank does in one round.

    Attributes:
        sends_to: a rank, or None.
        receives_from: a rank, or None.
        is_result: what arrives replaces what is held.
    """

    sends_to: int | None
    receives_from: int | None
    is_result: bool = False


def swaps_of(rank: int, num_workers: int) -> tuple[Swap, ...]:
    """The rounds of one rank; their number is the same for all ranks.

    Example:
        >>> [swap.sends_to for swap in swaps_of(1, 4)], [s.sends_to for s in swaps_of(2, 3)]
        ([0, 3], [0, None, None])
    """
    core = 1 << (num_workers.bit_length() - 1)
    extra = num_workers - core
    doubling = [1 << r for r in range(core.bit_length() - 1)]
    if rank >= core:
        middle = [Swap(None, None)] * len(doubling)
        first, last = Swap(rank - core, None), Swap(None, rank - core, is_result=True)
    else:
        middle = [Swap(rank ^ bit, rank ^ bit) for bit in doubling]
        partner = rank + core if rank < extra else None
        first, last = Swap(None, partner), Swap(partner, None)
    return (first, *middle, last) if extra else tuple(middle)


def _swap(held: Selection, swap: Swap, like: torch.Tensor, context: Context, last: bool) -> Round:
    nothing = torch.empty(0, dtype=torch.uint8, device=like.device)
    parts = [nothing] * context.num_workers
    if swap.sends_to is not None:
        parts[swap.sends_to] = pack_sparse(*held, like.numel())
    num_elements = held[0].numel() if swap.sends_to is not None else 0
    return Round(Op.ALL_TO_ALL, tuple(parts), last=last, num_elements=num_elements)


def _merged(mine: Selection, other: Selection, count: int) -> tuple[Selection, torch.Tensor]:
    """The `count` largest of the sum of two selections, and the indices that were dropped."""
    together, order = torch.cat([mine[0], other[0]]).sort(stable=True)
    first = torch.ones(together.numel(), dtype=torch.bool, device=together.device)
    first[1:] = together.diff() > 0
    indices = together[first]
    # An index stands here once or twice, so at most two terms are added: in any order the same.
    total = torch.zeros(indices.numel(), dtype=mine[1].dtype, device=mine[1].device)
    total.index_add_(0, first.cumsum(0) - 1, torch.cat([mine[1], other[1]])[order])
    keep = largest(total, count)
    gone = torch.ones(indices.numel(), dtype=torch.bool, device=indices.device)
    gone[keep] = False
    return (indices[keep], total[keep]), indices[gone]


def _conserving(sent: torch.Tensor, returned: Selection) -> Callable[[torch.Tensor], torch.Tensor]:
    """See `Exchanged.subtract_sent`: own elements that went through, less what came back."""

    def subtract_sent(given: torch.Tensor) -> torch.Tensor:
        return given.index_fill_(0, sent, 0.0).index_add_(0, *returned)

    return subtract_sent


GTOPK = Part(
    name="gtopk",
    summary="global top-k by pairwise merging; write ef+gtopk (ratio, residual)",
    origin=PUBLISHED,
    build=lambda options: options,
    options=GTopK,
)
