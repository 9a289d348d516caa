"""Compressors whose payloads all ranks gather: encode once, decode those of all ranks in order."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

from testbed.base.listed import joined
from testbed.base.types import Op, shard_bounds
from testbed.compression.common import require_values
from testbed.compression.protocol import (
    Arrived,
    ByteRange,
    Claims,
    Context,
    Conversation,
    Exchanged,
    Listing,
    Merger,
    Round,
    State,
    can_list,
    can_place,
)

MeanConversation = Generator[Round, Arrived, torch.Tensor]


@dataclass(frozen=True)
class Encoded:
    """An encoded message.

    Attributes:
        payload: uint8, one dimension.
        subtract_sent: see `Exchanged`.
    """

    payload: torch.Tensor
    subtract_sent: Callable[[torch.Tensor], torch.Tensor]


class Codec(Merger, Protocol):
    """Encodes single messages, without state."""

    @property
    def claims(self) -> Claims:
        """Its properties with these options."""
        ...

    def encode(self, values: torch.Tensor, context: Context) -> Encoded:
        """Values [n], checked, as a payload."""
        ...

    def payload_bytes(self, num_elements: int, element_bytes: int, context: Context) -> ByteRange:
        """Bytes of a payload."""
        ...


@dataclass(frozen=True)
class Gathered:
    """A codec as a compressor: one all-gather (or push, merge and pull on a server).

    Attributes:
        codec: what encodes and combines.
    """

    codec: Codec

    @property
    def claims(self) -> Claims:
        """See `Compressor.claims`."""
        return self.codec.claims

    def exchange(self, values: torch.Tensor, state: State, context: Context) -> Conversation:
        """See `Compressor.exchange`; `state` passes through."""
        require_values(values, context)
        encoded = self.codec.encode(values, context)
        mean = yield from gathered_mean(
            self.codec, encoded.payload, values, context.out, sparse=context.sparse
        )
        return Exchanged(mean, state, encoded.subtract_sent)

    def payload_bytes(self, num_elements: int, element_bytes: int, context: Context) -> ByteRange:
        """See `Compressor.payload_bytes`."""
        return self.codec.payload_bytes(num_elements, element_bytes, context)


def gathered_mean(
    merger: Merger,
    payload: torch.Tensor,
    like: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    sparse: bool = False,
) -> MeanConversation:
    """Part of a conversation: give a payload, get the mean of all ranks' payloads.

    Args:
        merger: combines payloads.
        payload: this rank's.
        like: [n]: size, dtype and device of the mean.
        out: see `Context.out`; used where it is like `like` and the merger can.
        sparse: see `Context.sparse`; used where the merger can.
    """
    arrived = yield Round(Op.ALL_GATHER, (payload,), merger, last=True)
    if sparse and can_list(merger):
        listed = _listed(merger, arrived, like)
        if listed is not None:
            return listed
    if out is not None and not (can_place(merger) and _alike(out, like)):
        out = None
    if not arrived.pieces:
        return _mean_of(merger, arrived, like, out)
    mean = torch.empty_like(like) if out is None else out
    bounds = pairwise(shard_bounds(like.numel(), len(arrived.pieces)))
    for piece, (low, high) in zip(arrived.pieces, bounds, strict=True):
        if can_place(merger):
            _mean_of(merger, piece, like[low:high], mean[low:high])
        else:
            mean[low:high] = _mean_of(merger, piece, like[low:high], None)
    return mean


def _mean_of(
    merger: Merger, arrived: Arrived, like: torch.Tensor, out: torch.Tensor | None
) -> torch.Tensor:
    if out is not None and can_place(merger):
        if arrived.pulled is not None:
            return merger.place_mean(arrived.pulled, out)
        return merger.place(arrived.parts, out)
    if arrived.pulled is not None:
        return merger.unpack_mean(arrived.pulled, like)
    return merger.combine(arrived.parts, like)


def _listed(merger: Listing, arrived: Arrived, like: torch.Tensor) -> torch.Tensor | None:
    """The mean as a sparse tensor; None: too many elements were sent."""
    if not arrived.pieces:
        if arrived.pulled is not None:
            return merger.list_packed(arrived.pulled, like)
        return merger.list_mean(arrived.parts, like)
    bounds = shard_bounds(like.numel(), len(arrived.pieces))
    pieces = []
    for piece, (low, high) in zip(arrived.pieces, pairwise(bounds), strict=True):
        listed = _listed(merger, piece, like[low:high])
        if listed is None:
            return None
        pieces.append((listed, low))
    return joined(pieces, like.numel())


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """A wrapper may exchange only a part of its message, or another dtype."""
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
