"""The parameter server's half: payloads of all ranks become one payload for all ranks.

A server that merges answers a GATHER with one payload instead of with everybody's: push, merge,
pull. Lossless, the pulled payload holds the union of what was pushed. Encoded again (by `again`,
with the server's own error feedback) it is as short as a pushed one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from testbed.compression.gathered import Codec
from testbed.compression.protocol import Arrived, Context, Merger, State, can_unite


@dataclass(frozen=True)
class Pulled:
    """What a server sends to all ranks.

    Attributes:
        payload: uint8, one dimension.
        lossless: it was packed by `Merger.pack_mean`; else it is a payload of the codec `again`.
    """

    payload: torch.Tensor
    lossless: bool

    def arrived(self) -> Arrived:
        """What a rank's conversation is answered with."""
        if self.lossless:
            return Arrived(pulled=self.payload)
        return Arrived(parts=(self.payload,))


def merge(
    merger: Merger,
    payloads: tuple[torch.Tensor, ...],
    like: torch.Tensor,
    state: State,
    context: Context,
    again: Codec | None = None,
) -> tuple[Pulled, State]:
    """One payload for all ranks, and the server's new state for this message.

    Args:
        merger: of the round that the payloads come from.
        payloads: one of each rank, in rank order.
        like: [n]: size, dtype and device of the message.
        state: what the last merge of this message returned; {} at first.
        context: of the message; its rank should be none of the workers', so that draws differ.
        again: encodes the mean plus the server's `residual` [n] for the way back; a codec whose
            payloads `merger` can combine (`topk` for every sparse compressor, a quantiser for
            itself); None: lossless, no state.

    Reference:
        Tang et al., 2019, ICML (DoubleSqueeze) for the second compression.

    Example:
        >>> from testbed.compression.selection import TopK
        >>> codec, like = TopK(0.5), torch.zeros(2)
        >>> parts = tuple(codec.encode(torch.tensor(v), Context()).payload
        ...               for v in ([2.0, 1.0], [0.0, 4.0]))
        >>> pulled, _ = merge(codec, parts, like, {}, Context())
        >>> codec.unpack_mean(pulled.payload, like).tolist()
        [1.0, 2.0]
        >>> pulled, state = merge(codec, parts, like, {}, Context(), again=codec)
        >>> codec.combine(pulled.arrived().parts, like).tolist(), state["residual"].tolist()
        ([0.0, 2.0], [1.0, 0.0])
    """
    if again is None:
        return Pulled(_united(merger, payloads, like), lossless=True), state
    mean = merger.combine(payloads, like)
    if "residual" in state:
        mean += state["residual"]
    encoded = again.encode(mean, context)
    return Pulled(encoded.payload, lossless=False), {"residual": encoded.subtract_sent(mean)}


def _united(merger: Merger, payloads: tuple[torch.Tensor, ...], like: torch.Tensor) -> torch.Tensor:
    if can_unite(merger):
        return merger.unite(payloads, like)
    return merger.pack_mean(merger.combine(payloads, like))
