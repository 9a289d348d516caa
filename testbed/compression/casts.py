"""Dense compressors: none at all, and 16-bit floating-point numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from testbed.base.errors import NonFiniteGradient
from testbed.base.parts import PUBLISHED, Part
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

        mean = (x_1 + ... + x_P) / P

    Bytes: n e.

    Raises:
        UsageError: an option is given; there are none.

    Example:
        >>> from testbed.compression.lockstep import Lockstep
        >>> job = Lockstep(Dense(), num_workers=2)
        >>> job.exchange([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])])[0].mean
        tensor([2., 3.])

    Reference:
        Synchronous SGD, as Li et al., 2020, VLDB (PyTorch Distributed). Departs: nothing.
    """

    claims: ClassVar[Claims] = Claims(unbiased=True, contraction=lambda values: 1.0)

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
    """Values rounded to 16-bit floats, divided by the number of ranks *before* they are summed.

        mean = round(x_1 / P) + ... + round(x_P / P),  each addition rounded

    Bytes: 2 n (16-bit values as they are). Rounding costs at most 2^-11 (fp16, above 6e-5 P) or
    2^-9 (bf16) of each value. As sums are rounded, too, the mean is that of what was sent only to
    this precision.

    Attributes:
        name: `fp16` (11 significant bits, up to 65504) or `bf16` (8 bits, the range of float32).

    Raises:
        NonFiniteGradient: in fp16 a value above 65504 P, or a mean above 65504.

    Example:
        >>> from testbed.compression.lockstep import Lockstep
        >>> job = Lockstep(Cast("bf16"), num_workers=2)
        >>> job.exchange([torch.tensor([1.0, 0.1]), torch.tensor([0.0, 0.1])])[0].mean
        tensor([0.5000, 0.1001])

    Reference:
        Micikevicius et al., 2018, ICLR (mixed precision). Departs: no loss scaling; where fp16
        overflows, use bf16.
    """

    name: Literal["fp16", "bf16"]
    claims: ClassVar[Claims] = Claims(mean_of_sent=False)

    @property
    def dtype(self) -> torch.dtype:
        """What travels."""
        return torch.float16 if self.name == "fp16" else torch.bfloat16

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


FP16 = Part(
    name="fp16",
    summary="rounded to 16 bits, averaged in them",
    origin=PUBLISHED,
    build=lambda options: Cast("fp16"),
)

BF16 = Part(
    name="bf16",
    summary="rounded to bfloat16, averaged in it",
    origin=PUBLISHED,
    build=lambda options: Cast("bf16"),
)
