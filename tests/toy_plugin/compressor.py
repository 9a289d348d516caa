"""A compressor: values as 8-bit levels of the largest magnitude in their message."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from testbed.base.parts import Part
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
class Int8:
    """Value v becomes round(127 v / s) with s = max |v|; bytes: n + 4. It is its own options."""

    @property
    def claims(self) -> Claims:
        """Rounding to the nearest level is biased; the mean is that of what was sent."""
        return Claims()

    def exchange(self, values: torch.Tensor, state: State, context: Context) -> Conversation:
        """One all-gather: everybody's levels come, and are averaged here."""
        require_values(values, context)
        scale = values.abs().amax().float() if values.numel() else torch.zeros(())
        levels = (values * (127 / scale.clamp(min=1e-30))).round().to(torch.int8)
        payload = torch.cat([scale.view(1).view(torch.uint8), levels.view(torch.uint8)])
        arrived = yield Round(Op.ALL_GATHER, (payload,), last=True)
        decoded = [decode(each, values) for each in arrived.parts]
        mean = sum(decoded[1:], decoded[0]) / context.num_workers
        return Exchanged(mean, state, lambda given: given.sub_(decode(payload, values)))

    def payload_bytes(self, num_elements: int, element_bytes: int, context: Context) -> ByteRange:
        """The same for all values."""
        return ByteRange(num_elements + 4, num_elements + 4)


def decode(payload: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Levels back as values [n]."""
    scale = payload[:4].clone().view(torch.float32)
    return (payload[4:].view(torch.int8).float() * (scale / 127)).to(like.dtype)


TOY_INT8 = Part(
    name="toy-int8",
    summary="8-bit levels of the largest magnitude",
    build=lambda options: options,
    options=Int8,
)
