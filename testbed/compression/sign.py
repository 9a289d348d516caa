"""Signs of gradients: a majority vote, scaled by the mean magnitude, or with two means."""

from __future__ import annotations

from dataclasses import dataclass

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
    sizes_of,
    unpack_codes,
)
from testbed.compression.gathered import Encoded, Gathered
from testbed.compression.protocol import ByteRange, Claims, Context
from testbed.compression.quantize import (
    Quantised,
    join_scales,
    scale_bytes,
    split_scales,
    working_dtype,
)
from testbed.compression.sparse import as_values
from testbed.compression.sparse_mean import SparseMeans
from testbed.compression.wrappers import ErrorFeedback


@dataclass(frozen=True)
class EfSignOptions:
    """`ef-sign`: scaled signs with error feedback.

        v = e + x;  sent = mean(|v|) sign(v) in each bucket;  e = v - sent

    Bytes: 4 ceil(n / bucket) + ceil(n / 8) (float64: 8 for each bucket), n e where that is less. A
    server sends the mean of scaled signs back as scaled signs, with error feedback of its own
    (`zmq-ps:repack=0`: dense, without loss).

    Attributes:
        vote: the majority's sign times the mean scale; else the mean of the scaled signs, for which
            nothing is ever lost: what was sent plus what is kept equals what was given.
        bucket: values that share a scale; 0: all of a message.

    Raises:
        UsageError: a bucket of less than 8.

    Example:
        >>> from testbed.compression.lockstep import Lockstep
        >>> from testbed.base.axes import COMPRESSORS
        >>> job = Lockstep(COMPRESSORS.resolve("ef-sign:bucket=8").build(), num_workers=1)
        >>> job.exchange([torch.tensor([1.0, -2.0, 3.0, 4.0])])[0].mean, job.states[0]["residual"]
        (tensor([ 2.5000, -2.5000,  2.5000,  2.5000]), tensor([-1.5000,  0.5000,  0.5000,  1.5000]))

    Reference:
        Karimireddy et al., 2019, ICML (EF-signSGD); the vote is that of Bernstein et al., 2019,
        ICLR. Departs: the scale is a bucket's, not a layer's; what a vote overrules is lost, so
        that with `vote` nothing is promised of error feedback; without, servers do as those of
        Zheng et al., 2019, NeurIPS (dist-EF-SGD).
    """

    vote: bool = False
    bucket: int = 512

    def __post_init__(self) -> None:
        require_bucket("ef-sign", self.bucket)


@dataclass(frozen=True)
class Sign:
    """`sign`: one bit for each value, the majority's sign as the result; 0 counts as positive.

        vote:    mean_i = sign(sum over ranks of sign(x_i)), times the mean scale if `scaled`
        no vote: mean_i = mean over ranks of sign(x_i) (times the rank's scale if `scaled`)
        scale of a bucket = mean |x_i|

    A vote's result is 0 on a tie; without `scaled` its magnitude is 1, so that the learning rate is
    the step. Scaled signs are a delta-contraction with delta = |x|_1^2 / (n |x|_2^2) of each
    bucket.

    Bytes: ceil(n / 8), with `scaled` 4 ceil(n / bucket) more (float64: 8 each), n e where that is
    less.

    Attributes:
        vote: the result is the majority's sign; else the mean of what was sent.
        scaled: each rank sends the mean magnitude of each bucket along.
        bucket: with `scaled`, values that share a scale; 0: all of a message.

    Raises:
        UsageError: a bucket of less than 8.

    Example:
        >>> from testbed.compression.lockstep import Lockstep
        >>> from testbed.compression.gathered import Gathered
        >>> job = Lockstep(Gathered(Sign()), num_workers=3)
        >>> values = [torch.tensor(v) for v in ([1.0, -2.0], [-1.0, -3.0], [5.0, 4.0])]
        >>> job.exchange(values)[0].mean, job.given_bytes
        (tensor([ 1., -1.]), [1, 1, 1])

    Reference:
        Bernstein et al., 2018, ICML, and 2019, ICLR (signSGD with majority vote). Departs: `scaled`
        and the mean without a vote are not part of it.
    """

    vote: bool = True
    scaled: bool = False
    bucket: int = 512

    def __post_init__(self) -> None:
        require_bucket("sign", self.bucket)

    @property
    def claims(self) -> Claims:
        """See `Codec.claims`."""
        return Claims(
            contraction=self._contraction if self.scaled else None,
            mean_of_sent=not self.vote,
            requantised=self.scaled and not self.vote,
        )

    def encode(self, values: torch.Tensor, context: Context) -> Encoded:
        """See `Codec.encode`."""
        if self._is_dense(values.numel(), values.element_size()):
            return Encoded(values.clone().view(torch.uint8), torch.Tensor.zero_)
        payload = pack_codes(values >= 0, 1)
        if self.scaled:
            payload = join_scales(self._magnitudes(values), payload)

        def subtract_sent(given: torch.Tensor) -> torch.Tensor:
            return given.sub_(self._decoded(payload, given))

        return Encoded(payload, subtract_sent)

    def combine(self, payloads: tuple[torch.Tensor, ...], like: torch.Tensor) -> torch.Tensor:
        """See `Merger.combine`."""
        if not self.vote:
            total = torch.zeros_like(like)
            for payload in payloads:
                total += self._decoded(payload, like)
            return total.div_(len(payloads))
        votes = torch.zeros(like.numel(), dtype=torch.int32, device=like.device)
        scales = torch.zeros_like(self._magnitudes(like))
        for payload in payloads:
            scale, up = self._split(payload, like)
            votes += up.int() * 2 - 1
            scales += scale
        return (votes.sign() * self._spread(scales / len(payloads), like)).to(like.dtype)

    def pack_mean(self, mean: torch.Tensor) -> torch.Tensor:
        """See `Merger.pack_mean`: of a vote the scale and 1 bit each, 2 bits where some are 0."""
        if not self.vote or mean.numel() == 0:
            return SparseMeans().pack_mean(mean)
        wide = mean.abs().to(working_dtype(mean.dtype))
        scale = in_buckets(wide, self.bucket if self.scaled else 0).amax(1)
        # The width is told by the length, so up to 4 values always take 2 bits.
        width = 2 if mean.numel() <= 4 or bool((mean == 0).any()) else 1
        codes = mean.sign().int() + 1 if width == 2 else mean > 0
        return join_scales(scale, pack_codes(codes, width))

    def unpack_mean(self, payload: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """See `Merger.unpack_mean`."""
        if not self.vote or like.numel() == 0:
            return SparseMeans().unpack_mean(payload, like)
        count = like.numel()
        scale, packed = split_scales(payload, self._num_scales(count), like)
        width = 2 if packed.numel() == packed_bytes(count, 2) else 1
        codes = unpack_codes(packed, count, width).int()
        signs = codes - 1 if width == 2 else codes * 2 - 1
        return (signs * self._spread(scale, like)).to(like.dtype)

    def payload_bytes(self, num_elements: int, element_bytes: int, context: Context) -> ByteRange:
        """See `Codec.payload_bytes`."""
        size = self._coded_bytes(num_elements, element_bytes)
        if self._is_dense(num_elements, element_bytes):
            size = num_elements * element_bytes
        return ByteRange(size, size)

    def _coded_bytes(self, num_elements: int, element_bytes: int) -> int:
        scales = self._num_scales(num_elements) * scale_bytes(element_bytes) if self.scaled else 0
        return scales + packed_bytes(num_elements, 1)

    def _is_dense(self, num_elements: int, element_bytes: int) -> bool:
        """Whether the values themselves are as short: one or two, with a scale."""
        return self._coded_bytes(num_elements, element_bytes) >= num_elements * element_bytes

    def _num_scales(self, num_elements: int) -> int:
        return num_buckets(num_elements, self.bucket) if self.scaled else 1

    def _magnitudes(self, values: torch.Tensor) -> torch.Tensor:
        """The scales [buckets] of values [n]; ones [1] where none are sent."""
        wide = values.to(working_dtype(values.dtype))
        if not self.scaled:
            return wide.new_ones(1)
        sums = in_buckets(wide.abs(), self.bucket).sum(1)
        return sums / sizes_of(values.numel(), self.bucket, wide).clamp(min=1)

    def _spread(self, scales: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return for_each(scales, self.bucket if self.scaled else 0, like.numel())

    def _split(
        self, payload: torch.Tensor, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales [buckets] and signs [n], 1 for those not below 0."""
        if self._is_dense(like.numel(), like.element_size()):
            values = as_values(payload, like)
            return self._magnitudes(values), (values >= 0).to(torch.uint8)
        if not self.scaled:
            return self._magnitudes(like), unpack_codes(payload, like.numel(), 1)
        scales, packed = split_scales(payload, self._num_scales(like.numel()), like)
        return scales, unpack_codes(packed, like.numel(), 1)

    def _decoded(self, payload: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        if self._is_dense(like.numel(), like.element_size()):
            return as_values(payload, like)
        scales, up = self._split(payload, like)
        spread = self._spread(scales, like)
        return torch.where(up.to(torch.bool), spread, -spread).to(like.dtype)

    def _contraction(self, values: torch.Tensor) -> float:
        wide = values.double()
        square = float(wide.square().sum())
        sizes = sizes_of(values.numel(), self.bucket, wide)
        kept = in_buckets(wide.abs(), self.bucket).sum(1).square() / sizes
        return float(kept.sum()) / square if square else 1.0


@dataclass(frozen=True)
class OneBit:
    """1-bit SGD: values at or above 0 become their mean in each bucket, those below 0 theirs.

        m+ = mean(x_i >= 0),  m- = mean(x_i < 0) of a bucket;  sent_i = m+ if x_i >= 0 else m-

    Bytes: 8 ceil(n / bucket) + ceil(n / 8) (float64: 16 for each bucket). A delta-contraction with
    delta = sum over buckets of (n+ m+^2 + n- m-^2), over |x|^2. A server quantises the mean again,
    with error feedback of its own, as published (`zmq-ps:repack=0`: dense, without loss).

    Attributes:
        bucket: values that share the two means; 0: all of a message.

    Raises:
        UsageError: a bucket of less than 8.

    Example:
        >>> from testbed.compression.lockstep import Lockstep
        >>> from testbed.compression.gathered import Gathered
        >>> from testbed.compression.quantize import Quantised
        >>> job = Lockstep(Gathered(Quantised(OneBit(8))), num_workers=1)
        >>> job.exchange([torch.tensor([1.0, -2.0, 3.0, -4.0])])[0].mean
        tensor([ 2., -3.,  2., -3.])

    Reference:
        Seide et al., 2014, Interspeech. Departs: buckets instead of the columns of a matrix; the
        paper always has error feedback: write `ef+onebit`.
    """

    bucket: int = 512

    def __post_init__(self) -> None:
        require_bucket("onebit", self.bucket)

    @property
    def claims(self) -> Claims:
        """See `Quantiser.claims`."""
        return Claims(contraction=self._contraction, requantised=True)

    def code(self, values: torch.Tensor, context: Context) -> torch.Tensor:
        """See `Quantiser.code`."""
        means, _ = self._means(values)
        return join_scales(means.view(-1), pack_codes(values >= 0, 1))

    def decode(self, coded: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """See `Quantiser.decode`."""
        count = num_buckets(like.numel(), self.bucket)
        means, packed = split_scales(coded, 2 * count, like)
        down, up = (for_each(m, self.bucket, like.numel()) for m in means.view(2, count))
        chosen = unpack_codes(packed, like.numel(), 1).to(torch.bool)
        return torch.where(chosen, up, down).to(like.dtype)

    def coded_bytes(self, num_elements: int, element_bytes: int) -> int:
        """See `Quantiser.coded_bytes`."""
        scales = 2 * num_buckets(num_elements, self.bucket) * scale_bytes(element_bytes)
        return scales + packed_bytes(num_elements, 1)

    def _means(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[2, buckets]: means of the values below 0 and of the others, 0 of none; their counts."""
        wide = values.to(working_dtype(values.dtype))
        rows = in_buckets(wide, self.bucket)
        sums = torch.stack([rows.clamp(max=0).sum(1), rows.clamp(min=0).sum(1)])
        down = (rows < 0).sum(1)
        counts = torch.stack([down, sizes_of(values.numel(), self.bucket, wide) - down])
        return sums / counts.clamp(min=1), counts

    def _contraction(self, values: torch.Tensor) -> float:
        means, counts = self._means(values)
        square = float(values.double().square().sum())
        return float((counts * means.double().square()).sum()) / square if square else 1.0


SIGN = Part(
    name="sign",
    summary="signs by majority vote (vote, scaled, bucket)",
    origin=PUBLISHED,
    build=Gathered,
    options=Sign,
    facts=lambda options: CompressorFacts({"sign": Sign}, requantised=options.claims.requantised),
)

EF_SIGN = Part(
    name="ef-sign",
    summary="scaled signs with error feedback (vote, bucket)",
    origin=PUBLISHED,
    build=lambda options: ErrorFeedback(Gathered(Sign(options.vote, True, options.bucket))),
    options=EfSignOptions,
    facts=lambda options: CompressorFacts({"sign": Sign}, requantised=not options.vote),
)

ONEBIT = Part(
    name="onebit",
    summary="signs and a mean for each of the two (bucket)",
    origin=PUBLISHED,
    build=lambda options: Gathered(Quantised(options)),
    options=OneBit,
    facts=lambda options: CompressorFacts(
        {"onebit": OneBit, "quantised": Quantised}, requantised=True
    ),
)
