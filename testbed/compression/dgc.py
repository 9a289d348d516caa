"""Deep gradient compression: momentum on the sender's side of a sampled top-k."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from testbed.base.axes import CompressorFacts
from testbed.base.parts import PUBLISHED, Part
from testbed.compression.common import (
    count_of,
    require_between,
    require_ratio,
    require_values,
)
from testbed.compression.gathered import gathered_mean
from testbed.compression.protocol import (
    ByteRange,
    Claims,
    Context,
    Conversation,
    Exchanged,
    State,
)
from testbed.compression.sparse import pack_sparse
from testbed.compression.sparse_mean import SparseMerger
from testbed.compression.topk import sampled_bytes, sampled_indices
from testbed.compression.wrappers import density_at


@dataclass(frozen=True)
class Dgc:
    """Momentum is accumulated where nothing is sent, and starts anew where something is.

        u <- momentum u + g;  v <- v + u;  send the largest ratio of |v|;  u = v = 0 there

    It carries the momentum, so the optimizer must have none.

    Bytes: as `topk-sampled`: min(k e + index_bytes(n, k), n e), k from 0.8 to 1.3 times ceil(ratio
    n).

    Attributes:
        ratio: share of elements that is sent, 0 < ratio <= 1.
        momentum: 0 <= momentum < 1; 0 makes it error feedback around `topk-sampled`.
        clip: the message's norm is clipped to clip / sqrt(P) before it is added; 0: not.
        masking: u, too, becomes 0 where something was sent (momentum factor masking).
        warmup_steps: steps (an epoch's, as published) at each of the densities 25, 6.25, 1.56, 0.39
            % and so on, as long as they are above `ratio`; 0: none.

    Raises:
        UsageError: an option outside of its range.

    Example:
        >>> from testbed.compression.lockstep import Lockstep
        >>> job = Lockstep(Dgc(0.5), num_workers=1)
        >>> [job.exchange([torch.tensor(g)])[0].mean.tolist() for g in ([1.0, 0.5], [0.25, 0.5])]
        [[1.0, 0.0], [0.0, 1.4500000476837158]]

    Reference:
        Lin et al., 2018, ICLR (DGC). Departs: clips a message, not the whole gradient; no Nesterov
        term.
    """

    ratio: float = 0.001
    momentum: float = 0.9
    clip: float = 0.0
    masking: bool = True
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        require_ratio("dgc", self.ratio)
        require_between("dgc", "momentum", self.momentum, 0, 0.9999)
        require_between("dgc", "clip", self.clip, 0, float("inf"))
        require_between("dgc", "warmup_steps", self.warmup_steps, 0, 1e9)

    @property
    def claims(self) -> Claims:
        """See `Compressor.claims`."""
        return Claims(keeps=True, carries_momentum=self.momentum > 0)

    def exchange(self, values: torch.Tensor, state: State, context: Context) -> Conversation:
        """See `Compressor.exchange`; `state` holds `u` and `v`, both [n]."""
        require_values(values, context)
        given = self._clipped(values, context.num_workers)
        velocity = given + self.momentum * state["u"] if "u" in state else given.clone()
        kept = velocity + state["v"] if "v" in state else velocity.clone()
        indices = sampled_indices(kept, self._count(kept.numel(), context), context)
        sent = kept[indices]
        payload = pack_sparse(indices, sent, kept.numel())
        kept.index_fill_(0, indices, 0.0)
        if self.masking:
            velocity.index_fill_(0, indices, 0.0)
        mean = yield from gathered_mean(SparseMerger(), payload, values, context.out)

        def subtract_sent(values: torch.Tensor) -> torch.Tensor:
            return values.index_add_(0, indices, sent, alpha=-1)

        return Exchanged(mean, {"u": velocity, "v": kept}, subtract_sent)

    def payload_bytes(self, num_elements: int, element_bytes: int, context: Context) -> ByteRange:
        """See `Compressor.payload_bytes`."""
        return sampled_bytes(num_elements, self._count(num_elements, context), element_bytes)

    def _count(self, num_elements: int, context: Context) -> int:
        ratio = self.ratio
        if self.warmup_steps:
            ratio = density_at(context.step, self.ratio, self.warmup_steps)
        return count_of(ratio, num_elements)

    def _clipped(self, values: torch.Tensor, num_workers: int) -> torch.Tensor:
        if self.clip == 0:
            return values
        norm = float(torch.linalg.vector_norm(values.double()))
        limit = self.clip / num_workers**0.5
        return values * (limit / norm) if norm > limit else values


DGC = Part(
    name="dgc",
    summary="deep gradient compression (ratio, momentum, clip, masking, warmup_steps)",
    origin=PUBLISHED,
    build=lambda options: options,
    options=Dgc,
    facts=lambda options: CompressorFacts(
        {"sparse": SparseMerger}, carries_momentum=options.momentum > 0
    ),
)
