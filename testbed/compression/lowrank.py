"""Low-rank compressors: PowerSGD (two sums) and ACP-SGD (one)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from testbed.base.errors import UsageError
from testbed.base.parts import PUBLISHED, Part
from testbed.base.types import Op
from testbed.compression.common import generator, require_between, require_values
from testbed.compression.protocol import (
    ByteRange,
    Claims,
    Compressor,
    Context,
    Conversation,
    Exchanged,
    Round,
    State,
)
from testbed.compression.quantize import working_dtype
from testbed.compression.wrappers import ErrorFeedback

# A message as matrices: what low-rank compressors factorise, and what they send as it is.

# A tensor of one dimension with more elements than this is taken for a slice of a larger one and
# viewed as a nearly square matrix; biases stay vectors.
_LONG_VECTOR = 16_384


@dataclass(frozen=True)
class Block:
    """One tensor of a message.

    Attributes:
        start: first element in the message.
        stop: one past the last.
        rows: of the matrix; 0 = sent as it is.
        cols: of the matrix, the last ones padded with zeros where rows * cols is more.
        rank: of the approximation, at most min(rows, cols).
    """

    start: int
    stop: int
    rows: int = 0
    cols: int = 0
    rank: int = 0

    def matrix(self, values: torch.Tensor) -> torch.Tensor:
        """This block of the values [n] as [rows, cols]."""
        padding = self.rows * self.cols - (self.stop - self.start)
        flat = values[self.start : self.stop]
        return torch.nn.functional.pad(flat, (0, padding)).view(self.rows, self.cols)

    def write(self, matrix: torch.Tensor, into: torch.Tensor) -> None:
        """The matrix [rows, cols] into its place among [n]."""
        into[self.start : self.stop] = matrix.reshape(-1)[: self.stop - self.start]


def blocks_of(shapes: Sequence[Sequence[int]], num_elements: int, rank: int) -> tuple[Block, ...]:
    """The tensors of a message, in order.

    A tensor of two or more dimensions is a matrix of its first dimension by the others. It is
    factorised where that is shorter: rank (rows + cols) < number of elements.

    Raises:
        UsageError: the shapes do not hold that many elements.

    Example:
        >>> [(b.rows, b.cols) for b in blocks_of([(20, 3, 3), (20,)], 200, 2)]
        [(20, 9), (0, 0)]
    """
    blocks, start = [], 0
    for shape in shapes or [(num_elements,)]:
        size = math.prod(shape)
        rows, cols = _view(shape, size)
        used = min(rank, rows, cols)
        if used * (rows + cols) < size:
            blocks.append(Block(start, start + size, rows, cols, used))
        else:
            blocks.append(Block(start, start + size))
        start += size
    if start != num_elements:
        raise UsageError(
            f"the shapes of the message hold {start} elements, the message {num_elements}; give "
            "the shape of each of its tensors, in order"
        )
    return tuple(blocks)


def join(pieces: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Factors and plain pieces, one after another, in the dtype of the message.

    Example:
        >>> join([torch.zeros(2, 2), torch.ones(1)], torch.zeros(1)).tolist()
        [0.0, 0.0, 0.0, 0.0, 1.0]
    """
    if not pieces:
        return like.new_empty(0)
    return torch.cat([piece.reshape(-1) for piece in pieces]).to(like.dtype)


def cut(flat: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """What `join` joined.

    Example:
        >>> [t.shape for t in cut(torch.zeros(5), [(2, 2), (1,)])]
        [torch.Size([2, 2]), torch.Size([1])]
    """
    sizes = [math.prod(shape) for shape in shapes]
    return [p.view(*s) for p, s in zip(torch.split(flat, sizes), shapes, strict=True)]


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Orthonormal columns that span those of [rows, rank]; deterministic, so equal on all ranks.

    Example:
        >>> orthonormal(torch.tensor([[3.0], [4.0]])).abs()
        tensor([[0.6000],
                [0.8000]])
    """
    basis: torch.Tensor = torch.linalg.qr(matrix).Q
    return basis


def first_factors(blocks: Sequence[Block], like: torch.Tensor, context: Context) -> torch.Tensor:
    """Normal draws for all right factors [cols, rank], joined; the same on all ranks and steps.

    Example:
        >>> first_factors(blocks_of([(9, 9)], 81, 2), torch.zeros(81), Context()).shape
        torch.Size([18])
    """
    start = Context(seed=context.seed, key=context.key)
    draw = generator(start, shared=True, device="cpu")
    count = sum(block.cols * block.rank for block in blocks)
    return torch.randn(count, generator=draw, dtype=torch.float64).to(like.device, like.dtype)


def _view(shape: Sequence[int], size: int) -> tuple[int, int]:
    """Rows and columns."""
    if len(shape) >= 2 and size:
        return shape[0], size // shape[0]
    if size > _LONG_VECTOR:
        rows = math.isqrt(size)
        return rows, -(-size // rows)
    return 1, size


@dataclass(frozen=True)
class PowerSgd:
    """One power iteration for each matrix G [rows, cols], started from the last step's factor.

        P = orthonormal(mean(G Q));  Q = mean(G^T P);  result P Q^T;  Q is kept

    Bytes: for each matrix e rank (rows + cols), in two sums; for vectors and small matrices n e, in
    the first. Which tensors are matrices: see `blocks_of`.

    Attributes:
        rank: columns of the factors, at most min(rows, cols).

    Raises:
        UsageError: `rank` outside 1 .. 4096, or shapes that do not hold the message's elements.

    Example:
        >>> from testbed.compression.lockstep import Lockstep
        >>> job = Lockstep(PowerSgd(1), num_workers=1, shapes=((3, 3),))
        >>> job.exchange([torch.tensor([1.0, 2, 3, 2, 4, 6, 3, 6, 9])])[0].mean.round()  # rank 1
        tensor([1., 2., 3., 2., 4., 6., 3., 6., 9.])
        >>> job.given_bytes
        [24]

    Reference:
        Vogels et al., 2019, NeurIPS (PowerSGD). Departs: long slices of a tensor are viewed as
        nearly square matrices; of float16 the kept Q is made orthonormal, which spans the same.
        Error feedback stands around it unless `feedback=0`.
    """

    rank: int = 4
    claims: ClassVar[Claims] = Claims()

    def exchange(self, values: torch.Tensor, state: State, context: Context) -> Conversation:
        """See `Compressor.exchange`."""
        require_values(values, context)
        blocks = blocks_of(context.shapes, values.numel(), self.rank)
        low, plain = _split(blocks)
        wide = values.to(working_dtype(values.dtype))
        last = state["right"] if "right" in state else first_factors(low, wide, context)
        right = cut(last, _rights(low))
        if values.dtype == torch.float16:  # Q has the scale of G, and G Q its square
            right = [orthonormal(q) for q in right]
        flat = join(
            [b.matrix(wide) @ q for b, q in zip(low, right, strict=True)]
            + [values[b.start : b.stop] for b in plain],
            values,
        )
        arrived = yield Round(Op.ALL_REDUCE, (flat,), last=not low)
        means = cut(arrived.parts[0] / context.num_workers, _lefts(low) + _plains(plain))
        left = [orthonormal(p.to(wide.dtype)) for p in means[: len(low)]]
        own = [b.matrix(wide).T @ p for b, p in zip(low, left, strict=True)]
        right = []
        if low:
            arrived = yield Round(Op.ALL_REDUCE, (join(own, values),), last=True)
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

    Bytes: for each matrix e rank rows at odd steps, e rank cols at even ones; for vectors and small
    matrices n e.

    Attributes:
        rank: columns of the factors, at most min(rows, cols).

    Raises:
        UsageError: `rank` outside 1 .. 4096, or shapes that do not hold the message's elements.

    Example:
        >>> from testbed.compression.lockstep import Lockstep
        >>> job = Lockstep(AcpSgd(1), num_workers=1, shapes=((3, 3),))
        >>> values = torch.tensor([1.0, 2, 3, 2, 4, 6, 3, 6, 9])  # of rank 1
        >>> [job.exchange([values])[0].mean.round().allclose(values) for step in range(2)]
        [False, True]
        >>> job.given_bytes
        [24]

    Reference:
        Zhang et al., 2023, ICDCS (ACP-SGD). Departs: long slices of a tensor are viewed as nearly
        square matrices; messages are those of the plan, without a threshold of their own. Error
        feedback stands around it unless `feedback=0`.
    """

    rank: int = 4
    claims: ClassVar[Claims] = Claims()

    def exchange(self, values: torch.Tensor, state: State, context: Context) -> Conversation:
        """See `Compressor.exchange`; `state` holds the factor of the last step."""
        require_values(values, context)
        low, plain = _split(blocks_of(context.shapes, values.numel(), self.rank))
        wide = values.to(working_dtype(values.dtype))
        turned = "left" in state
        shapes, others = (_lefts(low), _rights(low)) if turned else (_rights(low), _lefts(low))
        kept = state.get("left" if turned else "right")
        last = first_factors(low, wide, context) if kept is None else kept
        basis = [orthonormal(f) for f in cut(last, shapes)]
        own = [_oriented(b.matrix(wide), turned) @ f for b, f in zip(low, basis, strict=True)]
        flat = join(own + [values[b.start : b.stop] for b in plain], values)
        arrived = yield Round(Op.ALL_REDUCE, (flat,), last=True)
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


def _fed_back(compressor: Compressor, options: LowRankOptions) -> Compressor:
    return ErrorFeedback(compressor) if options.feedback else compressor


POWERSGD = Part(
    name="powersgd",
    summary="low-rank factors by power iteration, two sums (rank, feedback)",
    origin=PUBLISHED,
    build=lambda options: _fed_back(PowerSgd(options.rank), options),
    options=LowRankOptions,
)

ACP_SGD = Part(
    name="acp-sgd",
    summary="low-rank factors in turn, one sum (rank, feedback)",
    origin=PUBLISHED,
    build=lambda options: _fed_back(AcpSgd(options.rank), options),
    options=LowRankOptions,
)
