"""Takes the samples: every size, every backend, in turns; knows no bandwidth and prints nothing."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import torch

from testbed.backends.protocol import Backend
from testbed.base.dtypes import Dtype
from testbed.base.types import Op, Request, Result
from testbed.control.protocol import Control, gather
from testbed.microbench.config import OPS, Size, sizes, turns
from testbed.records.comm import EXACT_UP_TO, CommConfig, Operation

# What travels, chosen so that the exact result is known on every rank without any exchange.
#
# Every rank's elements are small integers that repeat after PERIOD elements, a prime, so that
# pieces which land at the wrong place do not look right. Every partial sum is exact in the dtype,
# whatever the order of additions. Each exchange starts at another element of the pattern, so that a
# result which is left over from an earlier exchange does not look right either.

PERIOD = 8191
LARGEST_VALUE = 16


def largest_value(dtype: Dtype, num_workers: int) -> int:
    """The largest element of any rank, such that the sum over all ranks is exact.

    Example:
        >>> largest_value("float32", 4), largest_value("uint8", 32)
        (16, 7)
    """
    return min(LARGEST_VALUE, EXACT_UP_TO[dtype] // num_workers)


def rank_pattern(rank: int, dtype: Dtype, num_workers: int) -> torch.Tensor:
    """The PERIOD elements that one rank's tensor repeats."""
    generator = random.Random(rank)
    top = largest_value(dtype, num_workers)
    return torch.tensor([generator.randint(0, top) for _ in range(PERIOD)], dtype=torch.int64)


def sum_pattern(dtype: Dtype, num_workers: int) -> torch.Tensor:
    """The PERIOD elements that the sum over all ranks repeats."""
    total = torch.zeros(PERIOD, dtype=torch.int64)
    for rank in range(num_workers):
        total += rank_pattern(rank, dtype, num_workers)
    return total


def fill(tensor: torch.Tensor, pattern: torch.Tensor, step: int) -> None:
    """Write the pattern of this step into a flat tensor.

    Args:
        tensor: [count], written.
        pattern: [PERIOD], of the tensor's dtype and device.
        step: number of the exchange; the pattern starts at its element `step % PERIOD`.
    """
    turned = torch.roll(pattern, -(step % PERIOD))
    rows = tensor.numel() // PERIOD
    tensor[: rows * PERIOD].view(rows, PERIOD).copy_(turned)
    tensor[rows * PERIOD :].copy_(turned[: tensor.numel() - rows * PERIOD])


def num_wrong(tensor: torch.Tensor, pattern: torch.Tensor, step: int) -> int:
    """Elements of a flat tensor that differ from the pattern of this step; NaN differs.

    Args:
        tensor: [count].
        pattern: [PERIOD], of the tensor's dtype and device.
        step: number of the exchange.
    """
    turned = torch.roll(pattern, -(step % PERIOD))
    rows = tensor.numel() // PERIOD
    body = tensor[: rows * PERIOD].view(rows, PERIOD) != turned
    tail = tensor[rows * PERIOD :] != turned[: tensor.numel() - rows * PERIOD]
    return int(body.sum()) + int(tail.sum())


# One exchange of each operation: what is submitted, what is waited for, what must have come.

ROOT = 0


@dataclass(frozen=True)
class Tensors:
    """What one rank needs for exchanges of any size up to the largest.

    Attributes:
        buffer: [largest count] elements; every backend exchanges in this same memory, so that
            caches and pages treat all alike.
        mine: [PERIOD], this rank's pattern.
        expected: patterns of the result: one, or for a gather one per rank.
    """

    buffer: torch.Tensor
    mine: torch.Tensor
    expected: tuple[torch.Tensor, ...]


def make_tensors(config: CommConfig, rank: int, largest_count: int, device: str) -> Tensors:
    """Allocate and touch the buffer, and find the expected patterns.

    Args:
        config: operation, dtype and workers.
        rank: this rank.
        largest_count: elements of the largest exchange.
        device: `cpu` or `cuda:<index>`.
    """
    dtype = getattr(torch, config.dtype)

    def placed(pattern: torch.Tensor) -> torch.Tensor:
        return pattern.to(device=device, dtype=dtype)

    def of_rank(rank: int) -> torch.Tensor:
        return placed(rank_pattern(rank, config.dtype, config.workers))

    if config.op == "gather":
        expected = tuple(of_rank(r) for r in range(config.workers))
    elif config.op == "broadcast":
        expected = (of_rank(ROOT),)
    else:
        expected = (placed(sum_pattern(config.dtype, config.workers)),)
    return Tensors(torch.zeros(largest_count, dtype=dtype, device=device), of_rank(rank), expected)


@dataclass(frozen=True, slots=True)
class Exchanged:
    """One exchange as this rank saw it: its seconds and what came."""

    time_s: float
    result: Result


def run_exchange(
    backend: Backend, operation: Operation, tensor: torch.Tensor, step: int, name: str
) -> Exchanged:
    """Meet the other ranks at the backend's own barrier, then exchange and time it.

    The time runs from just before `submit` to the return of `wait` (on a GPU: until the result is
    there); the barrier is not in it. It is the backend's own, because the control plane should not
    speak beside the exchanges.

    Args:
        backend: opened.
        operation: what to do.
        tensor: flat; holds this rank's elements, then the result (gather: unchanged).
        step: number of the exchange, equal on all ranks.
        name: of the backend, for errors; equal on all ranks.

    Raises:
        RankLost, DeadlineExceeded: as `Work.wait`.
    """
    key = f"{name}/{tensor.numel()}"
    backend.submit(Request(Op.BARRIER, key=f"{key}/begin", step=step)).wait()
    result = Result(tensor)
    start_s = time.perf_counter()
    for op in OPS[operation]:
        result = backend.submit(Request(op, tensor, key=key, step=step, root=ROOT)).wait()
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)  # a result may still be on its way to the device
    return Exchanged(time.perf_counter() - start_s, result)


def wrong_elements(
    operation: Operation, tensors: Tensors, tensor: torch.Tensor, result: Result, step: int
) -> int:
    """How many elements of the result differ from what must have come; a missing one counts."""
    if operation != "gather":
        return num_wrong(tensor, tensors.expected[0], step)
    total = 0
    for rank, pattern in enumerate(tensors.expected):
        part = result.parts[rank] if rank < len(result.parts) else tensor[:0]
        if part.numel() == tensor.numel():
            total += num_wrong(part.view(-1), pattern, step)
        else:
            total += max(tensor.numel(), part.numel())
    return total


@dataclass(frozen=True)
class SizeSamples:
    """What all ranks measured for one size.

    Attributes:
        size: the size.
        by_rank_s: [backend][rank][timed exchange] seconds.
        num_wrong: [backend] wrong elements on all ranks together; None = not checked.
    """

    size: Size
    by_rank_s: tuple[tuple[tuple[float, ...], ...], ...]
    num_wrong: tuple[int | None, ...]

    @property
    def samples_s(self) -> tuple[tuple[float, ...], ...]:
        """[backend][timed exchange] seconds: an exchange takes as long as on its slowest rank."""
        return tuple(tuple(map(max, zip(*ranks, strict=True))) for ranks in self.by_rank_s)

    @property
    def fastest_s(self) -> tuple[tuple[float, ...], ...]:
        """[backend][timed exchange] seconds of the rank that waited for the others least."""
        return tuple(tuple(map(min, zip(*ranks, strict=True))) for ranks in self.by_rank_s)


class RankSamples(msgspec.Struct, frozen=True):
    """The same of one rank, as it tells the others."""

    samples_s: list[list[float]]
    num_wrong: list[int]


def measure(
    config: CommConfig, backends: Sequence[Backend], control: Control, device: str = "cpu"
) -> Iterator[SizeSamples]:
    """Measure size after size; collective, and all ranks get the same.

    Args:
        config: what to measure.
        backends: opened, in the order of `config.backend`.
        control: the ranks exchange their samples here after each size, never during one.
        device: where the tensors are.

    Raises:
        RankLost, DeadlineExceeded: a rank was lost or did not come.
        UsageError: a backend cannot do what was asked.
    """
    plan = sizes(config)
    tensors = make_tensors(config, backends[0].rank, max(s.count for s in plan), device)
    first_step = 0
    for size in plan:
        mine = _measure_size(config, backends, control, tensors, size, first_step)
        first_step += len(backends) * (config.warmup + config.iters)
        control.state = f"comparing samples of {size.num_bytes} bytes"
        deadline_s, workers = config.deadline, config.workers
        ranks = gather(control, "comm samples", mine, RankSamples, deadline_s, workers)
        yield combine(size, ranks, checked=config.check > 0)


def _measure_size(
    config: CommConfig,
    backends: Sequence[Backend],
    control: Control,
    tensors: Tensors,
    size: Size,
    first_step: int,
) -> RankSamples:
    tensor = tensors.buffer[: size.count]
    mine = RankSamples([[] for _ in backends], [0] * len(backends))
    for turn in turns(config, size, first_step):
        name = config.backend[turn.contestant]
        control.state = f"in a {config.op} of {size.num_bytes} bytes over {name}"
        fill(tensor, tensors.mine, turn.step)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        done = run_exchange(backends[turn.contestant], config.op, tensor, turn.step, name)
        if turn.timed:
            mine.samples_s[turn.contestant].append(done.time_s)
        if turn.checked:
            mine.num_wrong[turn.contestant] += wrong_elements(
                config.op, tensors, tensor, done.result, turn.step
            )
    return mine


def combine(size: Size, ranks: Sequence[RankSamples], *, checked: bool) -> SizeSamples:
    """What the ranks told each other, backend by backend; wrong elements add up.

    Example:
        >>> one, two = RankSamples([[1.0, 4.0]], [0]), RankSamples([[2.0, 3.0]], [5])
        >>> both = combine(Size(8, 2), [one, two], checked=True)
        >>> both.samples_s, both.fastest_s, both.num_wrong
        (((2.0, 4.0),), ((1.0, 3.0),), (5,))
    """
    each = zip(*(r.samples_s for r in ranks), strict=True)
    by_rank = tuple(tuple(map(tuple, of_ranks)) for of_ranks in each)
    wrong = tuple(sum(counts) for counts in zip(*(r.num_wrong for r in ranks), strict=True))
    return SizeSamples(size, by_rank, wrong if checked else (None,) * len(wrong))
