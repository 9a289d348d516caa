"""Low-rank compressors: PowerSGD (two sums) and ACP-SGD (one)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from testbed.compression.checks import require_between, require_values
from testbed.compression.matrices import (
    Block,
    blocks_of,
    cut,
    first_factors,
    join,
    orthonormal,
)
from testbed.compression.protocol import (
    ByteRange,
    Claims,
    Context,
    Conversation,
    Exchanged,
    Form,
    Round,
    State,
)
from testbed.compression.quantised import working_dtype


@dataclass(frozen=True)
class PowerSgd:
    """One step of a power iteration for each matrix G [rows, cols], started where the last ended.

        P = orthonormal(mean(G Q));  Q = mean(G^T P);  result P Q^T;  Q is kept

    Bytes: for each matrix e rank (rows + cols), in two sums; for vectors and small matrices n e,
    in the first. Which tensors are matrices: see `matrices.blocks_of`.

    Attributes:
        rank: columns of the factors, at most min(rows, cols).

    Reference:
        Vogels et al., 2019, NeurIPS. Departs: long slices of a tensor are viewed as nearly square.
    """

    rank: int = 4

    @property
    def claims(self) -> Claims:
        """See `Compressor.claims`."""
        return Claims()

    def exchange(self, values: torch.Tensor, state: State, context: Context) -> Conversation:
        """See `Compressor.exchange`."""
        require_values(values, context)
        blocks = blocks_of(context.shapes, values.numel(), self.rank)
        low, plain = _split(blocks)
        wide = values.to(working_dtype(values.dtype))
        right = cut(state.get("right", first_factors(low, wide, context)), _rights(low))
        flat = join(
            [b.matrix(wide) @ q for b, q in zip(low, right, strict=True)]
            + [values[b.start : b.stop] for b in plain],
            values,
        )
        arrived = yield Round(Form.SUM, (flat,), last=not low)
        means = cut(arrived.parts[0] / context.num_workers, _lefts(low) + _plains(plain))
        left = [orthonormal(p.to(wide.dtype)) for p in means[: len(low)]]
        own = [b.matrix(wide).T @ p for b, p in zip(low, left, strict=True)]
        right = []
        if low:
            arrived = yield Round(Form.SUM, (join(own, values),), last=True)
            right = cut(arrived.parts[0].to(wide.dtype) / context.num_workers, _rights(low))
        mean = _rebuilt(values, low, left, right, plain, means[len(low) :])
        return Exchanged(mean, {"right": join(right, wide)}, _subtracting(low, left, own, plain))

    def payload_bytes(self, num_elements: int, element_bytes: int, context: Context) -> ByteRange:
        """See `Compressor.payload_bytes`."""
        low, plain = _split(blocks_of(context.shapes, num_elements, self.rank))
        factors = sum(b.rank * (b.rows + b.cols) for b in low)
        size = (factors + sum(b.stop - b.start for b in plain)) * element_bytes
        return ByteRange(size, size)


@dataclass(frozen=True)
class AcpSgd:
    """PowerSGD's two halves in turn, one at each step, so that each step has one sum only.

        odd:  Q = orthonormal(last Q);  P = G Q;  result mean(P) Q^T
        even: P = orthonormal(last P);  Q = G^T P;  result P mean(Q)^T

    Bytes: for each matrix e rank rows at odd steps, e rank cols at even ones; for vectors and
    small matrices n e.

    Attributes:
        rank: columns of the factors, at most min(rows, cols).

    Reference:
        Zhang et al., 2023, ICDCS (ACP-SGD).
    """

    rank: int = 4

    @property
    def claims(self) -> Claims:
        """See `Compressor.claims`."""
        return Claims()

    def exchange(self, values: torch.Tensor, state: State, context: Context) -> Conversation:
        """See `Compressor.exchange`; `state` holds the factor of the last step."""
        require_values(values, context)
        low, plain = _split(blocks_of(context.shapes, values.numel(), self.rank))
        wide = values.to(working_dtype(values.dtype))
        turned = "left" in state
        shapes, others = (_lefts(low), _rights(low)) if turned else (_rights(low), _lefts(low))
        last = state["left"] if turned else state.get("right", first_factors(low, wide, context))
        basis = [orthonormal(f) for f in cut(last, shapes)]
        own = [_oriented(b.matrix(wide), turned) @ f for b, f in zip(low, basis, strict=True)]
        flat = join(own + [values[b.start : b.stop] for b in plain], values)
        arrived = yield Round(Form.SUM, (flat,), last=True)
        means = cut(arrived.parts[0] / context.num_workers, others + _plains(plain))
        found = [f.to(wide.dtype) for f in means[: len(low)]]
        rest = means[len(low) :]
        if turned:
            mean = _rebuilt(values, low, basis, found, plain, rest)
            subtract = _subtracting(low, basis, own, plain)
        else:
            mean = _rebuilt(values, low, found, basis, plain, rest)
            subtract = _subtracting(low, own, basis, plain)
        return Exchanged(mean, {"right" if turned else "left": join(found, wide)}, subtract)

    def payload_bytes(self, num_elements: int, element_bytes: int, context: Context) -> ByteRange:
        """See `Compressor.payload_bytes`: the smaller and the larger of the two halves."""
        low, plain = _split(blocks_of(context.shapes, num_elements, self.rank))
        rest = sum(b.stop - b.start for b in plain)
        halves = (sum(b.rank * b.rows for b in low), sum(b.rank * b.cols for b in low))
        return ByteRange((min(halves) + rest) * element_bytes, (max(halves) + rest) * element_bytes)


@dataclass(frozen=True)
class LowRankOptions:
    """Options of `powersgd` and `acp-sgd`.

    Attributes:
        rank: columns of the factors; at most the smaller side of each matrix.
        feedback: what was not sent is added to the next gradient, as published.
    """

    rank: int = 4
    feedback: bool = True

    def __post_init__(self) -> None:
        require_between("low-rank", "rank", self.rank, 1, 4096)


Shapes = list[tuple[int, ...]]


def _split(blocks: Sequence[Block]) -> tuple[list[Block], list[Block]]:
    return [b for b in blocks if b.rank], [b for b in blocks if not b.rank]


def _lefts(blocks: Sequence[Block]) -> Shapes:
    return [(b.rows, b.rank) for b in blocks]


def _rights(blocks: Sequence[Block]) -> Shapes:
    return [(b.cols, b.rank) for b in blocks]


def _plains(blocks: Sequence[Block]) -> Shapes:
    return [(b.stop - b.start,) for b in blocks]


def _oriented(matrix: torch.Tensor, turned: bool) -> torch.Tensor:
    return matrix.T if turned else matrix


def _rebuilt(
    like: torch.Tensor,
    low: Sequence[Block],
    left: Sequence[torch.Tensor],
    right: Sequence[torch.Tensor],
    plain: Sequence[Block],
    rest: Sequence[torch.Tensor],
) -> torch.Tensor:
    """The message [n] of left right^T for each matrix, and the plain pieces."""
    mean = torch.empty_like(like)
    for block, p, q in zip(low, left, right, strict=True):
        block.write(p @ q.T, mean)
    for block, piece in zip(plain, rest, strict=True):
        mean[block.start : block.stop] = piece
    return mean


def _subtracting(
    low: Sequence[Block],
    left: Sequence[torch.Tensor],
    right: Sequence[torch.Tensor],
    plain: Sequence[Block],
) -> Callable[[torch.Tensor], torch.Tensor]:
    """See `Exchanged.subtract_sent`: each matrix less its own left right^T, the rest 0."""

    def subtract_sent(given: torch.Tensor) -> torch.Tensor:
        for block, p, q in zip(low, left, right, strict=True):
            block.write(block.matrix(given) - p @ q.T, given)
        for block in plain:
            given[block.start : block.stop] = 0
        return given

    return subtract_sent
