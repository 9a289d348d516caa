"""Compressors that send every element, coarsely: a quantiser as a codec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from testbed.compression.gathered import Encoded
from testbed.compression.protocol import ByteRange, Claims, Context
from testbed.compression.sparse import as_values
from testbed.compression.sparse_mean import SparseMeans


class Quantiser(Protocol):
    """What makes codes of values and values of codes."""

    @property
    def claims(self) -> Claims:
        """What it promises with these options."""
        ...

    def code(self, values: torch.Tensor, context: Context) -> torch.Tensor:
        """Values [n], n >= 1, as `coded_bytes` bytes (uint8)."""
        ...

    def decode(self, coded: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The values [n] that the codes stand for; `like` [n] gives size, dtype and device."""
        ...

    def coded_bytes(self, num_elements: int, element_bytes: int) -> int:
        """Bytes of the codes of n >= 1 values."""
        ...


@dataclass(frozen=True)
class Quantised(SparseMeans):
    """A quantiser as a `Codec`: dense wherever codes would not be shorter.

    The mean is that of the decoded payloads, added in rank order. A server sends it back as exact
    numbers, dense unless most are 0: let it encode again (`server`) to save on the way back too.

    Attributes:
        quantiser: makes the codes.
    """

    quantiser: Quantiser

    @property
    def claims(self) -> Claims:
        """See `Codec.claims`."""
        return self.quantiser.claims

    def encode(self, values: torch.Tensor, context: Context) -> Encoded:
        """See `Codec.encode`."""
        if self._is_dense(values.numel(), values.element_size()):
            return Encoded(values.clone().view(torch.uint8), torch.Tensor.zero_)
        coded = self.quantiser.code(values, context)
        return Encoded(coded, lambda given: given.sub_(self.quantiser.decode(coded, given)))

    def combine(self, payloads: tuple[torch.Tensor, ...], like: torch.Tensor) -> torch.Tensor:
        """See `Merger.combine`."""
        total = torch.zeros_like(like)
        dense = self._is_dense(like.numel(), like.element_size())
        for payload in payloads:
            total += as_values(payload, like) if dense else self.quantiser.decode(payload, like)
        return total.div_(len(payloads))

    def payload_bytes(self, num_elements: int, element_bytes: int, context: Context) -> ByteRange:
        """See `Codec.payload_bytes`: min(coded bytes, n e)."""
        size = num_elements * element_bytes
        if not self._is_dense(num_elements, element_bytes):
            size = self.quantiser.coded_bytes(num_elements, element_bytes)
        return ByteRange(size, size)

    def _is_dense(self, num_elements: int, element_bytes: int) -> bool:
        dense_bytes = num_elements * element_bytes
        if num_elements == 0:
            return True
        return self.quantiser.coded_bytes(num_elements, element_bytes) >= dense_bytes


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """What quantisers compute and send scales in: float32, or float64 for it.

    Example:
        >>> working_dtype(torch.bfloat16)
        torch.float32
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def scale_bytes(element_bytes: int) -> int:
    """Bytes of a scale for elements of that size.

    Example:
        >>> scale_bytes(2), scale_bytes(8)
        (4, 8)
    """
    return max(4, element_bytes)


def split_scales(
    coded: torch.Tensor, num_scales: int, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales [num_scales] in the working dtype, and the bytes after them.

    Example:
        >>> split_scales(torch.zeros(6, dtype=torch.uint8), 1, torch.zeros(1))[1].numel()
        2
    """
    cut = num_scales * scale_bytes(like.element_size())
    wide = torch.empty(0, dtype=working_dtype(like.dtype))
    return as_values(coded[:cut], wide), coded[cut:]


def join_scales(scales: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Scales, then packed codes, as one payload.

    Example:
        >>> join_scales(torch.zeros(1), torch.zeros(2, dtype=torch.uint8)).numel()
        6
    """
    return torch.cat([scales.contiguous().view(torch.uint8), codes])
