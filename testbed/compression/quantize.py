"""Quantisers that round at random: QSGD, TernGrad and natural compression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch

from testbed.base.axes import CompressorFacts
from testbed.base.parts import PUBLISHED, Part
from testbed.compression.bits import (
    for_each,
    in_buckets,
    num_buckets,
    pack_codes,
    packed_bytes,
    require_bucket,
    unpack_codes,
)
from testbed.compression.common import generator, require_between, uniform
from testbed.compression.gathered import Encoded, Gathered
from testbed.compression.protocol import ByteRange, Claims, Context
from testbed.compression.sparse import as_values
from testbed.compression.sparse_mean import SparseMeans


@dataclass(frozen=True)
class Natural:
    """Magnitudes rounded at random to one of the two nearest powers of two: 9 bits each.

        2^a <= |v| <= 2^(a+1):  2^(a+1) with probability (|v| - 2^a) / 2^a, else 2^a

    A random 23-bit number is added to the mantissa of the float32 and its carry kept, which is
    exact and needs no logarithm. Below 2^-126 the two choices are 0 and 2^-126; above 2^127 the
    result is 2^127.

    Bytes: n + ceil(n / 8). Unbiased, E |C(x) - x|^2 <= |x|^2 / 8.

    Raises:
        UsageError: an option is given; there are none.

    Example:
        >>> from testbed.compression.lockstep import Lockstep
        >>> from testbed.compression.gathered import Gathered
        >>> job = Lockstep(Gathered(Quantised(Natural())), num_workers=1)
        >>> job.exchange([torch.tensor([4.0, -0.5, 0.0])])[0].mean  # powers of two stay
        tensor([ 4.0000, -0.5000,  0.0000])

    Reference:
        Horvath et al., 2022, MSML (natural compression). Departs: float64 is rounded to float32
        first.
    """

    claims: ClassVar[Claims] = Claims(unbiased=True, contraction=lambda values: 7 / 8)

    def code(self, values: torch.Tensor, context: Context) -> torch.Tensor:
        """See `Quantiser.code`."""
        bits = values.to(torch.float32, copy=True).view(torch.int32)
        negative = bits < 0
        draw = generator(context, shared=False, device=values.device)
        carry = torch.randint(1 << 23, bits.shape, generator=draw, device=bits.device).int()
        exponents = ((bits & 0x7FFFFFFF) + carry) >> 23
        most = 142 if values.dtype == torch.float16 else 254  # 2^15 is its largest power of two
        return torch.cat([exponents.clamp_(max=most).to(torch.uint8), pack_codes(negative, 1)])

    def decode(self, coded: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """See `Quantiser.decode`."""
        exponents = coded[: like.numel()].to(torch.int32)
        negative = unpack_codes(coded[like.numel() :], like.numel(), 1).to(torch.int32)
        return ((exponents << 23) | (negative << 31)).view(torch.float32).to(like.dtype)

    def coded_bytes(self, num_elements: int, element_bytes: int) -> int:
        """See `Quantiser.coded_bytes`."""
        return num_elements + packed_bytes(num_elements, 1)


class Quantiser(Protocol):
    """Turns values into codes and codes into values."""

    @property
    def claims(self) -> Claims:
        """Its properties with these options."""
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
    """`qsgd`: random rounding to evenly spaced levels between 0 and the bucket's scale S.

        y = s |v| / S,  s = 2^(bits - 1) - 1;  l = floor(y) + (1 with probability y - floor(y))
        sent = sign(v) S l / s

    Bytes: 4 ceil(n / bucket) + ceil(n bits / 8) (scales of float64 gradients: 8). Unbiased.

    Attributes:
        bits: for each value, 2 to 8, its sign included.
        bucket: values that share a scale S; 0: all of a message.
        norm: S is the largest magnitude (`max`), which the authors' experiments took, or the
            Euclidean norm (`l2`) of their theory, whose variance is larger: with 4 bits and buckets
            of 512 normal values E |C(x) - x|^2 is 1.6 |x|^2 instead of 0.04 |x|^2.

    Raises:
        UsageError: bits outside 2 .. 8, or a bucket of less than 8.

    Example:
        >>> from testbed.compression.lockstep import Lockstep
        >>> from testbed.base.axes import COMPRESSORS
        >>> job = Lockstep(COMPRESSORS.resolve("qsgd:bits=8").build(), num_workers=1)
        >>> job.exchange([torch.tensor([127.0, -64.0, 0.0, 1.0, 1.0])])[0].mean, job.given_bytes
        (tensor([127., -64.,   0.,   1.,   1.]), [9])

    Reference:
        Alistarh et al., 2017, NeurIPS (QSGD). Departs: codes of fixed width, not Elias's.
    """

    bits: int = 4
    bucket: int = 512
    norm: Literal["l2", "max"] = "max"

    def __post_init__(self) -> None:
        require_between("qsgd", "bits", self.bits, 2, 8)
        require_bucket("qsgd", self.bucket)


@dataclass(frozen=True)
class TernGradOptions:
    """`terngrad`: each value becomes 0 or +-S at random, S the largest magnitude of the bucket.

        x <- clip(x, -c sigma, c sigma);  S = max |x|
        sent_i = sign(x_i) S with probability |x_i| / S, else 0

    Bytes: 4 ceil(n / bucket) + ceil(n / 4) (scales of float64 gradients: 8). Unbiased without
    clipping.

    Attributes:
        clip_sigmas: c, magnitudes are clipped to so many standard deviations about 0 (root of the
            mean square); 0: not.
        bucket: values that share a scale; 0: all of a message.

    Raises:
        UsageError: a negative `clip_sigmas`, or a bucket of less than 8.

    Example:
        >>> from testbed.compression.lockstep import Lockstep
        >>> from testbed.base.axes import COMPRESSORS
        >>> job = Lockstep(COMPRESSORS.resolve("terngrad").build(), num_workers=1)
        >>> job.exchange([torch.tensor([4.0, -4.0, 0.0, 4.0])])[0].mean, job.given_bytes
        (tensor([ 4., -4.,  0.,  4.]), [5])

    Reference:
        Wen et al., 2017, NeurIPS (TernGrad). Departs: the scale is each rank's own, not the largest
        of all ranks, and is taken over a message or bucket instead of a layer.
    """

    clip_sigmas: float = 2.5
    bucket: int = 0

    def __post_init__(self) -> None:
        require_between("terngrad", "clip_sigmas", self.clip_sigmas, 0, 1e6)
        require_bucket("terngrad", self.bucket)


QSGD = Part(
    name="qsgd",
    summary="random rounding to levels (bits, bucket, norm)",
    origin=PUBLISHED,
    build=lambda options: Gathered(Quantised(Levels(options.bits, options.bucket, options.norm))),
    options=QsgdOptions,
    facts=lambda options: CompressorFacts({"levels": Levels, "quantised": Quantised}),
)

TERNGRAD = Part(
    name="terngrad",
    summary="random rounding to 0 or +-scale (clip_sigmas, bucket)",
    origin=PUBLISHED,
    build=lambda options: Gathered(
        Quantised(Levels(2, options.bucket, "max", options.clip_sigmas))
    ),
    options=TernGradOptions,
    facts=lambda options: CompressorFacts({"levels": Levels, "quantised": Quantised}),
)

NATURAL = Part(
    name="natural",
    summary="random rounding to powers of two",
    origin=PUBLISHED,
    build=lambda options: Gathered(Quantised(Natural())),
    facts=lambda options: CompressorFacts({"natural": Natural, "quantised": Quantised}),
)
