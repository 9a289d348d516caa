"""Takes the samples: every size, every backend, in turns; knows no bandwidth and prints nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import torch

from testbed.backends.protocol import Backend
from testbed.control.protocol import Control
from testbed.microbench import payload
from testbed.microbench.exchange import (
    Tensors,
    make_tensors,
    run_exchange,
    wrong_elements,
)
from testbed.microbench.plan import Size, sizes, turns
from testbed.records.comm import CommConfig


@dataclass(frozen=True)
class SizeSamples:
    """What all ranks measured for one size.

    Attributes:
        size: the size.
        samples_s: [backend][timed exchange] seconds of the slowest rank.
        num_wrong: [backend] wrong elements on all ranks together; None = not checked.
    """

    size: Size
    samples_s: tuple[tuple[float, ...], ...]
    num_wrong: tuple[int | None, ...]


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
        control.set_state(f"comparing samples of {size.num_bytes} bytes")
        told = control.all_gather(
            "comm samples", msgspec.msgpack.encode(mine), config.deadline, members=config.workers
        )
        ranks = [msgspec.msgpack.decode(text, type=RankSamples) for text in told]
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
        control.set_state(f"in a {config.op} of {size.num_bytes} bytes over {name}")
        payload.fill(tensor, tensors.mine, turn.step)
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
    """An exchange takes as long as on its slowest rank; wrong elements add up.

    Example:
        >>> one, two = RankSamples([[1.0, 4.0]], [0]), RankSamples([[2.0, 3.0]], [5])
        >>> both = combine(Size(8, 2), [one, two], checked=True)
        >>> both.samples_s, both.num_wrong
        (((2.0, 4.0),), (5,))
    """
    slowest = tuple(
        tuple(max(times) for times in zip(*of_ranks, strict=True))
        for of_ranks in zip(*(r.samples_s for r in ranks), strict=True)
    )
    wrong = tuple(sum(counts) for counts in zip(*(r.num_wrong for r in ranks), strict=True))
    return SizeSamples(size, slowest, wrong if checked else (None,) * len(wrong))
