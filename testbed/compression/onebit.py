"""1-bit SGD: signs, and one mean for each of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from testbed.compression.bits import pack_codes, packed_bytes, unpack_codes
from testbed.compression.buckets import (
    for_each,
    in_buckets,
    num_buckets,
    require_bucket,
    sizes_of,
)
from testbed.compression.protocol import Claims, Context
from testbed.compression.quantised import join_scales, scale_bytes, split_scales, working_dtype


@dataclass(frozen=True)
class OneBit:
    """Of each bucket, values at or above 0 become their mean, those below 0 theirs.

    Bytes: 8 ceil(n / bucket) + ceil(n / 8) (float64: 16 for each bucket). A delta-contraction
    with delta = sum over buckets of (n+ m+^2 + n- m-^2), over |x|^2. The paper always has error
    feedback: write `ef+onebit`. On a server the mean goes back dense; `zmq-ps:repack=1` sends it
    as signs again.

    Attributes:
        bucket: values that share the two means; 0: all of a message.

    Raises:
        UsageError: a bucket of less than 8.

    Reference:
        Seide et al., 2014, Interspeech. Departs: buckets instead of the columns of a matrix.
    """

    bucket: int = 512

    def __post_init__(self) -> None:
        require_bucket("onebit", self.bucket)

    @property
    def claims(self) -> Claims:
        """See `Quantiser.claims`."""
        return Claims(contraction=self._contraction)

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
