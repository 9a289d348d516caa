"""Compressors that send selected elements unchanged: one way of selecting each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from testbed.base.axes import CompressorFacts
from testbed.base.errors import UsageError
from testbed.base.parts import PUBLISHED, Part
from testbed.compression.common import count_of, generator, require_ratio
from testbed.compression.gathered import Encoded, Gathered
from testbed.compression.protocol import ByteRange, Claims, Context
from testbed.compression.selection import above, largest, sampled
from testbed.compression.sparse import pack_sparse, sparse_bytes
from testbed.compression.sparse_mean import SparseMerger


@dataclass(frozen=True)
class TopK(SparseMerger):
    """The k elements of largest magnitude; of equal ones those of lower index.

        k = max(1, ceil(ratio n));  sent = {(i, x_i) : |x_i| among the k largest}

    Bytes: min(k e + index_bytes(n, k), n e), see `sparse`: at 1 % of float32 5.07 for each selected
    element. A delta-contraction with delta = k / n.

    Attributes:
        ratio: share of elements that is sent, 0 < ratio <= 1.

    Raises:
        UsageError: a ratio outside of that.

    Example:
        >>> from testbed.compression.lockstep import Lockstep
        >>> from testbed.compression.gathered import Gathered
        >>> job = Lockstep(Gathered(TopK(0.2)), num_workers=2)
        >>> values = [torch.tensor([1.0, -3.0, 2.0, 0.0]), torch.tensor([0.0, 1.0, 0.0, 4.0])]
        >>> job.exchange(values)[0].mean, job.given_bytes
        (tensor([ 0.0000, -1.5000,  0.0000,  2.0000]), [5, 5])

    Reference:
        Stich, Cordonnier and Jaggi, 2018, NeurIPS (sparsified SGD with memory). Departs: the memory
        is not part of it; write `ef+topk`.
    """

    ratio: float = 0.01

    def __post_init__(self) -> None:
        require_ratio("topk", self.ratio)

    @property
    def claims(self) -> Claims:
        """See `Codec.claims`."""
        return Claims(contraction=lambda v: count_of(self.ratio, v.numel()) / v.numel())

    def encode(self, values: torch.Tensor, context: Context) -> Encoded:
        """See `Codec.encode`."""
        return encode_selected(values, largest(values, count_of(self.ratio, values.numel())))

    def payload_bytes(self, num_elements: int, element_bytes: int, context: Context) -> ByteRange:
        """See `Codec.payload_bytes`."""
        count = count_of(self.ratio, num_elements)
        size = sparse_bytes(num_elements, count, element_bytes)
        return ByteRange(size, size)


@dataclass(frozen=True)
class TopKSampled(SparseMerger):
    """About ratio n elements of largest magnitude, by a threshold from a 1 % strided sample.

        threshold = ratio-quantile of |sample|;  sent = {(i, x_i) : |x_i| >= threshold}

    More than 1.3 k elements are cut down to k = ceil(ratio n); below 0.8 k the threshold is
    lowered.

    Bytes: as `topk` with the k that was found, 0.8 to 1.3 times ceil(ratio n). A delta-contraction
    with delta = k / n.

    Attributes:
        ratio: share of elements that is wanted, 0 < ratio <= 1.

    Raises:
        UsageError: a ratio outside of that.

    Example:
        >>> from testbed.compression.lockstep import Lockstep
        >>> from testbed.compression.gathered import Gathered
        >>> job = Lockstep(Gathered(TopKSampled(0.5)), num_workers=1)
        >>> job.exchange([torch.tensor([1.0, -3.0])])[0].mean
        tensor([ 0., -3.])

    Reference:
        Lin et al., 2018, ICLR (DGC). Departs: see `selection.sampled`; small messages are selected
        exactly.
    """

    ratio: float = 0.01

    def __post_init__(self) -> None:
        require_ratio("topk-sampled", self.ratio)

    @property
    def claims(self) -> Claims:
        """See `Codec.claims`."""
        return Claims(contraction=lambda v: 0.8 * count_of(self.ratio, v.numel()) / v.numel())

    def encode(self, values: torch.Tensor, context: Context) -> Encoded:
        """See `Codec.encode`."""
        count = count_of(self.ratio, values.numel())
        return encode_selected(values, sampled_indices(values, count, context))

    def payload_bytes(self, num_elements: int, element_bytes: int, context: Context) -> ByteRange:
        """See `Codec.payload_bytes`."""
        return sampled_bytes(num_elements, count_of(self.ratio, num_elements), element_bytes)


@dataclass(frozen=True)
class Threshold(SparseMerger):
    """All elements whose magnitude is at least `value`.

        sent = {(i, x_i) : |x_i| >= value}

    Bytes: as `topk` with the k that was found, anything from 0 to the dense n e.

    Attributes:
        value: the threshold, above 0, in the units of the gradient.

    Raises:
        UsageError: a value that is not above 0 and finite.

    Example:
        >>> from testbed.compression.lockstep import Lockstep
        >>> from testbed.compression.gathered import Gathered
        >>> job = Lockstep(Gathered(Threshold(2.0)), num_workers=1)
        >>> job.exchange([torch.tensor([1.0, -3.0, 0.0])])[0].mean
        tensor([ 0., -3.,  0.])

    Reference:
        Strom, 2015, Interspeech. Departs: values are sent as they are, not as +-threshold; the
        remainder is kept by `ef+threshold`.
    """

    value: float = 1e-3
    claims: ClassVar[Claims] = Claims()

    def __post_init__(self) -> None:
        if not 0 < self.value < float("inf"):
            raise UsageError(f"threshold value is {self.value:g}; expected a number above 0")

    def encode(self, values: torch.Tensor, context: Context) -> Encoded:
        """See `Codec.encode`."""
        return encode_selected(values, above(values, self.value))

    def payload_bytes(self, num_elements: int, element_bytes: int, context: Context) -> ByteRange:
        """See `Codec.payload_bytes`."""
        return ByteRange(0, num_elements * element_bytes)


def encode_selected(values: torch.Tensor, indices: torch.Tensor) -> Encoded:
    """The values at ascending indices as a payload.

    Example:
        >>> encode_selected(torch.ones(2), torch.tensor([1])).subtract_sent(torch.ones(2))
        tensor([1., 0.])
    """
    payload = pack_sparse(indices, values[indices], values.numel())
    return Encoded(payload, zeroing(indices))


def zeroing(indices: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """What `subtract_sent` is where elements are sent as they are: they become 0.

    Example:
        >>> zeroing(torch.tensor([0]))(torch.ones(2))
        tensor([0., 1.])
    """
    return lambda values: values.index_fill_(0, indices, 0.0)


def sampled_indices(values: torch.Tensor, count: int, context: Context) -> torch.Tensor:
    """Ascending indices of about `count` largest, the sample's start drawn for this step.

    Example:
        >>> sampled_indices(torch.tensor([1.0, -3.0]), 1, Context()).tolist()
        [1]
    """
    draw = generator(context, shared=False, device="cpu")
    return sampled(values, count, int(torch.randint(100, (), generator=draw)))


def sampled_bytes(num_elements: int, count: int, element_bytes: int) -> ByteRange:
    """Bytes of 0.8 to 1.3 times `count` elements.

    Example:
        >>> sampled_bytes(100_000, 1000, 4)
        ByteRange(least=4096, most=6538)
    """
    least, most = int(0.8 * count), min(num_elements, int(1.3 * count) + 1)
    return ByteRange(
        sparse_bytes(num_elements, least, element_bytes),
        sparse_bytes(num_elements, most, element_bytes),
    )


TOPK = Part(
    name="topk",
    summary="the largest share (ratio), exactly",
    origin=PUBLISHED,
    build=Gathered,
    options=TopK,
    facts=lambda options: CompressorFacts({"topk": TopK, "sparse": SparseMerger}),
)

TOPK_SAMPLED = Part(
    name="topk-sampled",
    summary="about the largest share (ratio), by a threshold from a sample",
    origin=PUBLISHED,
    build=Gathered,
    options=TopKSampled,
    facts=lambda options: CompressorFacts({"topk-sampled": TopKSampled, "sparse": SparseMerger}),
)

THRESHOLD = Part(
    name="threshold",
    summary="all of a magnitude and above (value)",
    origin=PUBLISHED,
    build=Gathered,
    options=Threshold,
    facts=lambda options: CompressorFacts({"threshold": Threshold, "sparse": SparseMerger}),
)
