"""Ok-Topk: each rank sums up one region of the indices, so that no rank receives all of them."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

import torch

from testbed.base.parts import PUBLISHED, Part
from testbed.base.types import Op
from testbed.compression.common import (
    count_of,
    require_between,
    require_ratio,
    require_values,
)
from testbed.compression.protocol import (
    Arrived,
    ByteRange,
    Claims,
    Context,
    Conversation,
    Exchanged,
    Round,
    State,
)
from testbed.compression.selection import above, largest
from testbed.compression.sparse import pack_sparse, sparse_bytes, unpack_sparse
from testbed.compression.topk import zeroing

Selection = tuple[torch.Tensor, torch.Tensor]  # ascending indices [k], values [k]
# A count this far from k means that a threshold has gone stale.
_LEAST, _MOST = 2 / 3, 4 / 3
_PER_RANK_BYTES = 3 + 8  # indices of each region rounded up; a boundary


@dataclass(frozen=True)
class OkTopK:
    """About the k largest of the sum of all ranks' k largest, summed region by region.

        1. every `rebalance` steps: boundaries <- mean over ranks of the quantiles of the selections
        2. each rank sends {x_i : |x_i| >= local threshold} to the owners of the regions, who add up
        3. owners send {sum_i : |sum_i| >= global threshold} to all

    Step 1 is one sum of P - 1 numbers. Thresholds are exact every `every` steps (everything summed
    then travels in 3) and are used again in between. What a rank selected and the result contains
    counts as sent; nothing is lost.

    Bytes: in 2 at most 4/3 k elements as in `topk`; in 3 what is kept of the own region, about k /
    P where boundaries fit (at exact steps 4/3 k), 4/3 k P at most where all selections crowd in one
    region since boundaries were set; 8 (P - 1) at each rebalancing. Where two selections,
    boundaries and rounding are no less than n e, the message is summed as it is: n e bytes.

    Attributes:
        ratio: share of elements, 0 < ratio <= 1.
        every: steps between exact thresholds.
        rebalance: steps between new boundaries.

    Raises:
        UsageError: an option outside of its range.

    Example:
        >>> from testbed.compression.lockstep import Lockstep
        >>> job = Lockstep(OkTopK(0.01), num_workers=2)
        >>> values = [torch.zeros(400), torch.zeros(400)]
        >>> values[0][3], values[1][3], values[1][300] = 5.0, 3.0, 7.0
        >>> mean = job.exchange(values)[0].mean  # 3 and 300 are in the result, other values are 0
        >>> mean[3], mean[300], int(mean.count_nonzero())
        (tensor(4.), tensor(3.5000), 2)

    Reference:
        Li and Hoefler, 2022, PPoPP (Ok-Topk). Departs: a local threshold that selects less than 2/3
        k or more than 4/3 k is made exact at once; the global one is multiplied by (found /
        k)^(1/8) after each step in between; step 3 gathers the regions as they are, without
        balancing them once more, so that the published 6 k (P - 1) / P for each rank holds only
        while boundaries fit. Keeps nothing by itself: the paper's residual is `ef+oktopk`.
    """

    ratio: float = 0.01
    every: int = 32
    rebalance: int = 64
    claims: ClassVar[Claims] = Claims()

    def __post_init__(self) -> None:
        require_ratio("oktopk", self.ratio)
        require_between("oktopk", "every", self.every, 1, 1e9)
        require_between("oktopk", "rebalance", self.rebalance, 1, 1e9)

    def exchange(self, values: torch.Tensor, state: State, context: Context) -> Conversation:
        """See `Compressor.exchange`; `state`: two thresholds [1], boundaries [P + 1]."""
        require_values(values, context)
        count = count_of(self.ratio, values.numel())
        if self._is_dense(values.numel(), values.element_size(), context.num_workers):
            arrived = yield Round(Op.ALL_REDUCE, (values.clone(),), last=True)
            mean = arrived.parts[0].div_(context.num_workers)
            return Exchanged(mean, state, torch.Tensor.zero_)
        # A threshold of 0, left by a step of few values, would select everything for ever.
        known = "global" in state and float(state["global"]) > 0
        exact = context.step % self.every == 0 or not known
        own, local = _selected(values, count, None if exact else float(state["local"]))
        bounds = state.get("bounds")
        if bounds is None or context.step % self.rebalance == 0:
            bounds = yield from _balanced(own, values, context)
        region = yield from _reduced(own, values, bounds, context)
        threshold = 0.0 if exact else float(state["global"])
        keep = region[1].abs() >= threshold
        start, stop = _region(bounds, context.rank)
        payload = pack_sparse(region[0][keep], region[1][keep], stop - start)
        arrived = yield Round(
            Op.ALL_GATHER, (payload,), last=True, num_elements=int(keep.count_nonzero())
        )
        result = _joined(arrived, values, bounds)
        if exact:
            top = largest(result[1], min(count, result[1].numel()))
            result = (result[0][top], result[1][top])
            threshold = float(result[1].abs().min()) if top.numel() else 0.0
        else:
            threshold *= _drift(result[0].numel(), count)
        mean = torch.zeros_like(values)
        mean[result[0]] = result[1] / context.num_workers
        kept = {
            "local": torch.tensor([local], dtype=torch.float64),
            "global": torch.tensor([threshold], dtype=torch.float64),
            "bounds": bounds,
        }
        return Exchanged(mean, kept, zeroing(own[torch.isin(own, result[0])]))

    def payload_bytes(self, num_elements: int, element_bytes: int, context: Context) -> ByteRange:
        """See `Compressor.payload_bytes`: bounds for one step of any kind.

        Each region's payload rounds its indices up to whole bytes: 3 bytes for each rank.
        """
        dense = num_elements * element_bytes
        if self._is_dense(num_elements, element_bytes, context.num_workers):
            return ByteRange(dense, dense)
        one = self._selection_bytes(num_elements, element_bytes)
        return ByteRange(0, one + dense + _PER_RANK_BYTES * context.num_workers)

    def _selection_bytes(self, num_elements: int, element_bytes: int) -> int:
        count = count_of(self.ratio, num_elements)
        return sparse_bytes(num_elements, min(num_elements, int(_MOST * count) + 1), element_bytes)

    def _is_dense(self, num_elements: int, element_bytes: int, num_workers: int) -> bool:
        """Whether selecting saves nothing; all ranks find the same."""
        twice = 2 * self._selection_bytes(num_elements, element_bytes)
        return twice + _PER_RANK_BYTES * num_workers >= num_elements * element_bytes


def _selected(
    values: torch.Tensor, count: int, threshold: float | None
) -> tuple[torch.Tensor, float]:
    """Ascending indices by the old threshold, or by a new exact one; and the threshold used."""
    if threshold is not None:
        found = above(values, threshold)
        if _LEAST * count <= found.numel() <= _MOST * count:
            return found, threshold
    found = largest(values, count)
    return found, float(values[found].abs().min()) if count else 0.0


def _balanced(
    own: torch.Tensor, values: torch.Tensor, context: Context
) -> Generator[Round, Arrived, torch.Tensor]:
    """Boundaries [P + 1], int64 on the CPU, the same on all ranks."""
    parts = context.num_workers
    places = torch.arange(1, parts) * own.numel() // parts
    quantiles = own.cpu()[places] if own.numel() else torch.zeros(parts - 1)
    arrived = yield Round(Op.ALL_REDUCE, (quantiles.double().to(values.device),), num_elements=0)
    inner = (arrived.parts[0].cpu() / parts).round().long()
    ends = torch.tensor([0, values.numel()])
    return torch.cat([ends[:1], inner, ends[1:]])


def _reduced(
    own: torch.Tensor, values: torch.Tensor, bounds: torch.Tensor, context: Context
) -> Generator[Round, Arrived, Selection]:
    """This rank's region: indices from its start, and their sums over ranks, in rank order."""
    cuts = torch.searchsorted(own.cpu(), bounds)
    parts = []
    for owner in range(context.num_workers):
        mine = own[int(cuts[owner]) : int(cuts[owner + 1])]
        start, stop = _region(bounds, owner)
        parts.append(pack_sparse(mine - start, values[mine], stop - start))
    sent_on = own.numel() - int(cuts[context.rank + 1] - cuts[context.rank])
    arrived = yield Round(Op.ALL_TO_ALL, tuple(parts), num_elements=sent_on)
    start, stop = _region(bounds, context.rank)
    like = values.new_empty(stop - start)
    total, touched = torch.zeros_like(like), torch.zeros_like(like, dtype=torch.bool)
    for part in arrived.parts:
        indices, selected = unpack_sparse(part, like)
        total.index_add_(0, indices, selected)
        touched[indices] = True
    places = touched.nonzero().view(-1)
    return places, total[places]


def _joined(arrived: Arrived, values: torch.Tensor, bounds: torch.Tensor) -> Selection:
    """All regions' payloads as one selection from [n]."""
    indices, selected = [], []
    for owner, payload in enumerate(arrived.parts):
        start, stop = _region(bounds, owner)
        places, sums = unpack_sparse(payload, values.new_empty(stop - start))
        kept = sums != 0  # a dense payload names those that were not kept, too
        indices.append(places[kept] + start)
        selected.append(sums[kept])
    return torch.cat(indices), torch.cat(selected)


def _region(bounds: torch.Tensor, owner: int) -> tuple[int, int]:
    return int(bounds[owner]), int(bounds[owner + 1])


def _drift(found: int, count: int) -> float:
    """What the global threshold is multiplied by: the same on all ranks, which all saw `found`.

    With error feedback many sums lie just below the threshold, so it is moved gently.
    """
    return min(1.25, max(0.8, math.pow(found / max(1, count), 0.125)))


OKTOPK = Part(
    name="oktopk",
    summary="top-k in balanced regions; write ef+oktopk (ratio, every, rebalance)",
    origin=PUBLISHED,
    build=lambda options: options,
    options=OkTopK,
)
