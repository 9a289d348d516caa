"""Small messages go uncompressed: their cost is latency, not bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from testbed.compression.casts import Cast, Dense
from testbed.compression.checks import require_between
from testbed.compression.protocol import (
    ByteRange,
    Claims,
    Compressor,
    Context,
    Conversation,
    State,
)
from testbed.errors import UsageError


@dataclass(frozen=True)
class BySizeOptions:
    """Options of `by-size`.

    Attributes:
        min_elements: messages with fewer elements take `small`.
        small: `none`, `fp16` or `bf16`.
    """

    min_elements: int = 1024
    small: Literal["none", "fp16", "bf16"] = "none"

    def __post_init__(self) -> None:
        require_between("by-size", "min_elements", self.min_elements, 0, float("inf"))


@dataclass(frozen=True)
class BySize:
    """The inner compressor for messages of `min_elements` and more, a plain one for the others.

    Attributes:
        inner: for the large ones.
        options: see `BySizeOptions`.

    Raises:
        UsageError: the inner one does the optimizer's momentum, which small messages then lacked.
    """

    inner: Compressor
    options: BySizeOptions

    def __post_init__(self) -> None:
        if self.inner.claims.carries_momentum:
            raise UsageError(
                "by-size stands before a compressor that does the momentum of SGD itself, so that "
                "small messages would train without any; leave by-size out (of few elements "
                "dgc sends few bytes), or give the compressor momentum=0"
            )

    @property
    def claims(self) -> Claims:
        """See `Compressor.claims`; those that hold for messages of either size."""
        return Claims(
            mean_of_sent=self.inner.claims.mean_of_sent and self.options.small == "none",
            keeps=self.inner.claims.keeps,
        )

    def exchange(self, values: torch.Tensor, state: State, context: Context) -> Conversation:
        """See `Compressor.exchange`."""
        return self._for(values.numel()).exchange(values, state, context)

    def payload_bytes(self, num_elements: int, element_bytes: int, context: Context) -> ByteRange:
        """See `Compressor.payload_bytes`."""
        return self._for(num_elements).payload_bytes(num_elements, element_bytes, context)

    def _for(self, num_elements: int) -> Compressor:
        if num_elements >= self.options.min_elements:
            return self.inner
        return Dense() if self.options.small == "none" else Cast(self.options.small)
