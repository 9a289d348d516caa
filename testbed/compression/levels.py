"""Stochastic rounding to evenly spaced levels between 0 and a scale: QSGD and TernGrad."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from testbed.compression.bits import pack_codes, packed_bytes, unpack_codes
from testbed.compression.buckets import for_each, in_buckets, num_buckets, require_bucket
from testbed.compression.checks import require_between
from testbed.compression.draws import uniform
from testbed.compression.protocol import Claims, Context
from testbed.compression.quantised import join_scales, scale_bytes, split_scales, working_dtype


@dataclass(frozen=True)
class Levels:
    """A value v of a bucket with scale S becomes sign(v) S l / s with a whole l in 0 .. s.

    l is y = s |v| / S rounded up with probability y - floor(y), so its expectation is y.

    Attributes:
        bits: for each value; s = 2^(bits - 1) - 1 levels above 0.
        bucket: values that share a scale; 0: all of a message.
        norm: S is the bucket's Euclidean norm (`l2`) or largest magnitude (`max`).
        clip_sigmas: magnitudes are first clipped to so many standard deviations about 0; 0: not.
    """

    bits: int
    bucket: int
    norm: Literal["l2", "max"]
    clip_sigmas: float = 0.0

    @property
    def claims(self) -> Claims:
        """See `Quantiser.claims`."""
        return Claims(unbiased=self.clip_sigmas == 0)

    def code(self, values: torch.Tensor, context: Context) -> torch.Tensor:
        """See `Quantiser.code`."""
        wide = values.to(working_dtype(values.dtype))
        if self.clip_sigmas and wide.numel() > 1:
            peak = wide.abs().amax()
            # About 0, as gradients are taken to be: of equal values none is an outlier.
            sigma = peak * (wide / peak).square_().mean().sqrt() if peak else peak
            limit = self.clip_sigmas * sigma
            wide = wide.clamp(-limit, limit)
        scales = self._scales(wide)
        num_levels = self._num_levels()
        level = (wide / for_each(scales, self.bucket, wide.numel())).mul_(num_levels)
        magnitude = level.abs()
        whole = magnitude.floor()
        whole += uniform(wide, context) < magnitude.sub_(whole)
        codes = whole.clamp_(max=num_levels).copysign_(level).add_(num_levels)
        return join_scales(scales, pack_codes(codes.to(torch.uint8), self.bits))

    def decode(self, coded: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """See `Quantiser.decode`."""
        scales, packed = split_scales(coded, num_buckets(like.numel(), self.bucket), like)
        codes = unpack_codes(packed, like.numel(), self.bits).to(scales.dtype)
        level = codes.sub_(self._num_levels()).div_(self._num_levels())
        return level.mul_(for_each(scales, self.bucket, like.numel())).to(like.dtype)

    def coded_bytes(self, num_elements: int, element_bytes: int) -> int:
        """See `Quantiser.coded_bytes`: ceil(n / bucket) scales and ceil(n bits / 8)."""
        scales = num_buckets(num_elements, self.bucket) * scale_bytes(element_bytes)
        return scales + packed_bytes(num_elements, self.bits)

    def _num_levels(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def _scales(self, wide: torch.Tensor) -> torch.Tensor:
        """[number of buckets]; never below the bucket's largest magnitude, 1 where all is 0."""
        padded = in_buckets(wide, self.bucket)
        peak = padded.abs().amax(dim=1)
        peak = torch.where(peak == 0, torch.ones_like(peak), peak)
        if self.norm == "max":
            return peak
        # Divided by the peak first, so that squares neither overflow nor vanish.
        norm = peak * torch.linalg.vector_norm(padded / peak[:, None], dim=1)
        norm = norm.clamp_(max=torch.finfo(wide.dtype).max)
        return torch.where(norm == 0, torch.ones_like(norm), torch.maximum(norm, peak))


@dataclass(frozen=True)
class QsgdOptions:
    """Options of `qsgd`.

    Bytes: 4 ceil(n / bucket) + ceil(n bits / 8) (scales of float64 gradients: 8). Unbiased.

    Attributes:
        bits: for each value, 2 to 8, its sign included.
        bucket: values that share a norm; 0: all of a message.
        norm: `l2` as published, or `max`: less variance for few bits.

    Reference:
        Alistarh et al., 2017, NeurIPS. Departs: codes of fixed width, not Elias's.
    """

    bits: int = 4
    bucket: int = 512
    norm: Literal["l2", "max"] = "l2"

    def __post_init__(self) -> None:
        require_between("qsgd", "bits", self.bits, 2, 8)
        require_bucket("qsgd", self.bucket)


@dataclass(frozen=True)
class TernGradOptions:
    """Options of `terngrad`: 0 or +-scale for each value, the scale the largest magnitude.

    Bytes: 4 ceil(n / bucket) + ceil(n / 4) (scales of float64 gradients: 8). Unbiased without
    clipping.

    Attributes:
        clip_sigmas: magnitudes are clipped to so many standard deviations about 0 (root of the
            mean square); 0: not.
        bucket: values that share a scale; 0: all of a message.

    Reference:
        Wen et al., 2017, NeurIPS. Departs: the scale is each rank's own, not the largest of all
        ranks, and is taken over a message or bucket instead of a layer.
    """

    clip_sigmas: float = 2.5
    bucket: int = 0

    def __post_init__(self) -> None:
        require_between("terngrad", "clip_sigmas", self.clip_sigmas, 0, 1e6)
        require_bucket("terngrad", self.bucket)
