"""What compressing cost: bytes, times and elements, added up over messages and steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from testbed.base.types import Op
from testbed.compression.lockstep import handed_over_bytes
from testbed.compression.protocol import Round
from testbed.compression.sparse import sparse_count
from testbed.compression.sparse_mean import SparseMerger
from testbed.records.cell import CompressionResult
from testbed.statistics.summary import covered_s


@dataclass(frozen=True)
class Costs:
    """Sums over messages, on one rank.

    Attributes:
        dense_bytes: of the values, before.
        sent_bytes: handed over, payloads alone; parts for oneself do not count.
        encode_s: until each round could leave.
        rounds_s: beginning and end of each round, without what it waited for its channel.
        settled_s: time during which rounds were under way that `rounds_s` holds no more.
        decode_s: from the last answer to the mean.
        num_elements: of the values.
        num_sent: elements that the payloads carry.
    """

    dense_bytes: int = 0
    sent_bytes: int = 0
    encode_s: float = 0.0
    rounds_s: tuple[tuple[float, float], ...] = ()
    decode_s: float = 0.0
    num_elements: int = 0
    num_sent: int = 0
    settled_s: float = 0.0

    def __add__(self, other: Costs) -> Costs:
        return Costs(
            self.dense_bytes + other.dense_bytes,
            self.sent_bytes + other.sent_bytes,
            self.encode_s + other.encode_s,
            self.rounds_s + other.rounds_s,
            self.decode_s + other.decode_s,
            self.num_elements + other.num_elements,
            self.num_sent + other.num_sent,
            self.settled_s + other.settled_s,
        )

    @property
    def communication_s(self) -> float:
        """Time during which any round was under way; several of them at once count once."""
        return self.settled_s + covered_s(self.rounds_s)

    def settled(self) -> Costs:
        """The same, once no round can be added that was under way beside these.

        Example:
            >>> Costs(rounds_s=((0.0, 2.0), (1.0, 3.0), (5.0, 6.0))).settled().settled_s
            4.0
        """
        return replace(self, rounds_s=(), settled_s=self.communication_s)

    def with_round(
        self, given: Round, rank: int, element_bytes: int, cut: Sequence[torch.Tensor] = ()
    ) -> Costs:
        """With what a round hands over.

        Args:
            given: the round.
            rank: this worker.
            element_bytes: of the values.
            cut: what a gathered payload was cut into, if it was: ranges have shorter indices.
        """
        is_cut = cut and given.op is Op.ALL_GATHER
        parts_bytes = sum(part.nbytes for part in cut)
        return replace(
            self,
            sent_bytes=self.sent_bytes
            + (parts_bytes if is_cut else handed_over_bytes(given, rank)),
            num_sent=self.num_sent + _elements_of(given, self.num_elements, element_bytes),
        )


def _elements_of(given: Round, num_elements: int, element_bytes: int) -> int:
    """How many elements' values a round carries."""
    if given.num_elements is not None:
        return given.num_elements
    if given.op is Op.ALL_REDUCE:
        return given.parts[0].numel()
    if isinstance(given.merger, SparseMerger):
        return sparse_count(given.parts[0].numel(), num_elements, element_bytes)
    return num_elements


def summarise(
    compressor: str,
    steps: Sequence[Costs],
    relative_errors: Sequence[float],
    state_bytes: int,
    note: str,
) -> CompressionResult:
    """The record of one rank's compression.

    Args:
        compressor: as given.
        steps: costs of each measured step.
        relative_errors: of the steps in which the mean was compared with the true one.
        state_bytes: kept between steps.
        note: what else there is to say.

    Example:
        >>> steps = [Costs(dense_bytes=800, sent_bytes=8, num_elements=200, num_sent=2)]
        >>> summarise("topk:ratio=0.01", steps, [0.5, 0.7], 0, "").density
        0.01
    """
    total, count = sum((step.settled() for step in steps), Costs()), max(1, len(steps))
    return CompressionResult(
        compressor=compressor,
        dense_bytes=round(total.dense_bytes / count),
        sent_bytes=round(total.sent_bytes / count),
        encode_s=total.encode_s / count,
        communication_s=total.communication_s / count,
        decode_s=total.decode_s / count,
        relative_error=sum(relative_errors) / len(relative_errors) if relative_errors else None,
        density=total.num_sent / total.num_elements if total.num_elements else None,
        state_bytes=state_bytes,
        note=note,
    )
