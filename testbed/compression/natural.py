"""Natural compression: magnitudes rounded to powers of two, up or down at random."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from testbed.compression.bits import pack_codes, packed_bytes, unpack_codes
from testbed.compression.draws import generator
from testbed.compression.protocol import Claims, Context


@dataclass(frozen=True)
class Natural:
    """Sign and exponent of each value as float32: 9 bits.

    Between 2^a and 2^(a+1) the upper is taken with probability (|v| - 2^a) / 2^a: a random
    23-bit number is added to the mantissa and its carry kept, which is exact and needs no
    logarithm. Below 2^-126 the two choices are 0 and 2^-126; above 2^127 the result is 2^127.

    Bytes: n + ceil(n / 8). Unbiased, E |C(x) - x|^2 <= |x|^2 / 8.

    Reference:
        Horvath et al., 2022, MSML (natural compression).
    """

    @property
    def claims(self) -> Claims:
        """See `Quantiser.claims`."""
        return Claims(unbiased=True, contraction=lambda values: 7 / 8)

    def code(self, values: torch.Tensor, context: Context) -> torch.Tensor:
        """See `Quantiser.code`."""
        bits = values.to(torch.float32, copy=True).view(torch.int32)
        negative = bits < 0
        draw = generator(context, shared=False, device=values.device)
        carry = torch.randint(1 << 23, bits.shape, generator=draw, device=bits.device).int()
        exponents = ((bits & 0x7FFFFFFF) + carry) >> 23
        return torch.cat([exponents.clamp_(max=254).to(torch.uint8), pack_codes(negative, 1)])

    def decode(self, coded: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """See `Quantiser.decode`."""
        exponents = coded[: like.numel()].to(torch.int32)
        negative = unpack_codes(coded[like.numel() :], like.numel(), 1).to(torch.int32)
        return ((exponents << 23) | (negative << 31)).view(torch.float32).to(like.dtype)

    def coded_bytes(self, num_elements: int, element_bytes: int) -> int:
        """See `Quantiser.coded_bytes`."""
        return num_elements + packed_bytes(num_elements, 1)
