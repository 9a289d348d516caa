"""A message as matrices: what low-rank compressors factorise, and what they send as it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from testbed.compression.draws import generator
from testbed.compression.protocol import Context
from testbed.errors import UsageError

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
