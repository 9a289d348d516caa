"""Random-k: the same randomly chosen elements on all ranks, so that they can be summed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from testbed.base.parts import PUBLISHED, Part
from testbed.base.types import Op
from testbed.compression.common import count_of, generator, require_ratio, require_values
from testbed.compression.protocol import (
    ByteRange,
    Claims,
    Context,
    Conversation,
    Exchanged,
    Round,
    State,
)


@dataclass(frozen=True)
class RandomK:
    """One element of each of k equal strata, drawn by a seed that all ranks share; one all-reduce.

        k = max(1, ceil(ratio n));  stratum j = [j n / k, (j + 1) n / k);  one uniform index in each
        sent_j = x_index, with `scale` times the size of the stratum

    Bytes: k e; no indices travel. A delta-contraction in expectation with delta = 1 / ceil(n / k);
    unbiased with `scale` (do not combine that with `ef`: the residual grows).

    Attributes:
        ratio: share of elements that is sent, 0 < ratio <= 1.
        scale: multiply by the inverse of the probability.

    Raises:
        UsageError: a ratio outside of that.

    Example:
        >>> from testbed.compression.lockstep import Lockstep
        >>> job = Lockstep(RandomK(0.5), num_workers=2)
        >>> values = [torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([3.0, 4.0, 5.0, 6.0])]
        >>> job.exchange(values)[0].mean, job.given_bytes
        (tensor([2., 0., 4., 0.]), [8, 8])

    Reference:
        Stich, Cordonnier and Jaggi, 2018, NeurIPS. Departs: strata instead of all subsets, so that
        drawing costs k and not n; each element's probability is the same to 1 / n.
    """

    ratio: float = 0.01
    scale: bool = False

    def __post_init__(self) -> None:
        require_ratio("randomk", self.ratio)

    @property
    def claims(self) -> Claims:
        """See `Compressor.claims`."""
        if self.scale:
            return Claims(unbiased=True)
        return Claims(contraction=lambda v: 1 / -(-v.numel() // count_of(self.ratio, v.numel())))

    def exchange(self, values: torch.Tensor, state: State, context: Context) -> Conversation:
        """See `Compressor.exchange`."""
        require_values(values, context)
        indices, sizes = strata_draws(values, count_of(self.ratio, values.numel()), context)
        chosen = values[indices]
        if self.scale:
            chosen *= sizes
        arrived = yield Round(Op.ALL_REDUCE, (chosen.clone(),), last=True)
        mean = torch.zeros_like(values)
        mean[indices] = arrived.parts[0] / context.num_workers

        def subtract_sent(given: torch.Tensor) -> torch.Tensor:
            return given.index_add_(0, indices, chosen, alpha=-1)

        return Exchanged(mean, state, subtract_sent)

    def payload_bytes(self, num_elements: int, element_bytes: int, context: Context) -> ByteRange:
        """See `Compressor.payload_bytes`."""
        size = count_of(self.ratio, num_elements) * element_bytes
        return ByteRange(size, size)


def strata_draws(
    values: torch.Tensor, count: int, context: Context
) -> tuple[torch.Tensor, torch.Tensor]:
    """One index [k] in each of k strata of [n], ascending, and the strata's sizes [k].

    Drawn on the CPU, so that ranks on different devices agree.

    Example:
        >>> indices, sizes = strata_draws(torch.zeros(10), 4, Context())
        >>> sizes.tolist(), bool((indices.diff() > 0).all())
        ([2.0, 3.0, 2.0, 3.0], True)
    """
    edges = torch.arange(count + 1, dtype=torch.int64) * values.numel() // max(count, 1)
    sizes = edges.diff()
    draw = torch.rand(
        count, generator=generator(context, shared=True, device="cpu"), dtype=torch.float64
    )
    indices = edges[:-1] + (draw * sizes).long().clamp_(max=sizes - 1)
    return indices.to(values.device), sizes.to(values.device, values.dtype)


RANDOMK = Part(
    name="randomk",
    summary="a random share (ratio), the same on all ranks, summed (scale)",
    origin=PUBLISHED,
    build=lambda options: options,
    options=RandomK,
)
