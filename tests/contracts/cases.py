"""What the cases share: inputs that every rank can compute for all ranks, and named meetings."""

from __future__ import annotations

import torch

from testbed.backends.protocol import Backend, Group
from testbed.base.types import Op, Request, Result

MEET_S = 60.0
WITHIN_S = 60.0

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
}
FLOATS = ("float32", "float16", "bfloat16", "float64")
# 393 228 is cut evenly among 2, 3 and 4 ranks, and its shards into several pieces.
SIZES = (0, 1, 2, 3, 5, 1000, 1023, 65_537, 393_228, 1_000_003)


def device_of(backend: Backend) -> str:
    return "cpu" if "cpu" in backend.capabilities.device_types else "cuda"


def integers(rank: int, num_elements: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """Small integers: their sums over a few ranks are exact in every dtype."""
    return _repeat(_period(rank, salt), num_elements).to(dtype)


def sum_of_integers(
    num_ranks: int, num_elements: int, dtype: torch.dtype, salt: int = 0
) -> torch.Tensor:
    """What a sum of `integers` must be, computed with integers."""
    total = torch.stack([_period(rank, salt) for rank in range(num_ranks)]).sum(0)
    return _repeat(total.to(torch.uint8), num_elements).to(dtype)


def _period(rank: int, salt: int) -> torch.Tensor:
    # 11 and 8 share no factor with sizes and shards here, so a shifted shard shows.
    return ((torch.arange(11) * 7 + rank * 3 + salt) % 8).to(torch.uint8)


def _repeat(period: torch.Tensor, num_elements: int) -> torch.Tensor:
    return period.repeat(num_elements // 11 + 1)[:num_elements]


def normals(rank: int, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randn(num_elements, generator=generator).to(dtype)


def meet(group: Group, name: str) -> None:
    """A named point that all ranks reach before any goes on, without the backend."""
    group.control.all_gather(f"case {name}", b"", MEET_S, members=group.size)


def do(backend: Backend, op: Op, tensor: torch.Tensor | None, **more: object) -> Result:
    """One exchange from beginning to end."""
    return backend.submit(Request(op, tensor, **more)).wait(WITHIN_S)  # type: ignore[arg-type]


def assert_same(actual: torch.Tensor, expected: torch.Tensor, what: object = "") -> None:
    """Equal in dtype, shape and every bit that counts."""
    actual = actual.cpu()
    assert actual.dtype == expected.dtype, (what, actual.dtype, expected.dtype)
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    if not torch.equal(actual, expected):
        wrong = (actual != expected).view(-1).nonzero().view(-1)
        first = int(wrong[0])
        raise AssertionError(
            f"{what}: {len(wrong)} of {actual.numel()} elements differ, the first is number "
            f"{first}: {actual.view(-1)[first]} instead of {expected.view(-1)[first]}"
        )
