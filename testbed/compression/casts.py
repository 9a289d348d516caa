"""Dense compressors: nothing, and narrower floating-point numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from testbed.base.errors import NonFiniteGradient
from testbed.base.types import Op
from testbed.compression.common import require_values
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
class Dense:
    """No compression: the sum of all values, divided by the number of ranks.

    Bytes: n e.
    """

    @property
    def claims(self) -> Claims:
        """See `Compressor.claims`."""
        return Claims(unbiased=True, contraction=lambda values: 1.0)

    def exchange(self, values: torch.Tensor, state: State, context: Context) -> Conversation:
        """See `Compressor.exchange`."""
        require_values(values, context)
        arrived = yield Round(Op.ALL_REDUCE, (values.clone(),), last=True)
        return Exchanged(arrived.parts[0].div_(context.num_workers), state, torch.Tensor.zero_)

    def payload_bytes(self, num_elements: int, element_bytes: int, context: Context) -> ByteRange:
        """See `Compressor.payload_bytes`."""
        return ByteRange(num_elements * element_bytes, num_elements * element_bytes)


@dataclass(frozen=True)
class Cast:
    """Values rounded to a 16-bit float, divided by the number of ranks *before* they are summed.

    Bytes: 2 n (of 16-bit values: as they are). Rounding costs at most 2^-11 (fp16, above 6e-5 P)
    or 2^-9 (bf16) of each value. The sum itself is rounded too, so the mean is that of what was
    sent only to this precision.

    Attributes:
        name: `fp16` or `bf16`.

    Raises:
        NonFiniteGradient: in fp16 a value above 65504 P, or a mean above 65504.

    Reference:
        Micikevicius et al., 2018, ICLR (mixed precision). Departs: no loss scaling; see `bf16`.
    """

    name: Literal["fp16", "bf16"]

    @property
    def dtype(self) -> torch.dtype:
        """What travels."""
        return torch.float16 if self.name == "fp16" else torch.bfloat16

    @property
    def claims(self) -> Claims:
        """See `Compressor.claims`."""
        return Claims(mean_of_sent=False)

    def exchange(self, values: torch.Tensor, state: State, context: Context) -> Conversation:
        """See `Compressor.exchange`."""
        require_values(values, context)
        narrow = (values / context.num_workers).to(self.dtype)
        if self.name == "fp16" and bool(narrow.isinf().any()):
            raise _beyond_fp16("a value over the number of ranks", context)
        sent = narrow.to(values.dtype, copy=True)
        arrived = yield Round(Op.ALL_REDUCE, (narrow,), last=True)
        if self.name == "fp16" and bool(arrived.parts[0].isinf().any()):
            raise _beyond_fp16("the mean over the ranks", context)

        def subtract_sent(given: torch.Tensor) -> torch.Tensor:
            return given.sub_(sent, alpha=context.num_workers)

        return Exchanged(arrived.parts[0].to(values.dtype, copy=True), state, subtract_sent)

    def payload_bytes(self, num_elements: int, element_bytes: int, context: Context) -> ByteRange:
        """See `Compressor.payload_bytes`."""
        return ByteRange(2 * num_elements, 2 * num_elements)


def _beyond_fp16(what: str, context: Context) -> NonFiniteGradient:
    return NonFiniteGradient(
        f"message {context.key!r} exceeds fp16: {what} is above 65504 in step {context.step} on "
        f"rank {context.rank}; use bf16, or scale the loss down"
    )
