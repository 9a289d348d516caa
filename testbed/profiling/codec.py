"""Measures a compressor on this machine: timed exchanges of n ranks in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import msgspec
import torch

from testbed.base.axes import COMPRESSORS
from testbed.base.errors import UsageError
from testbed.base.types import Op
from testbed.compression.common import ratio_of
from testbed.compression.lockstep import carry_out, handed_over_bytes
from testbed.compression.protocol import (
    Arrived,
    Compressor,
    Context,
    Conversation,
    Exchanged,
    Merger,
    Round,
    State,
    can_cut,
)
from testbed.compression.server_merge import bounds_of, merge
from testbed.prediction.codec import CodecCost, CodecSample, FormName, RoundCost

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 22)
# Steps are numbered from here: the steady state is measured, not the first stage of a warm-up.
BEHIND_WARM_UP = 1_000_000
_FORMS: dict[Op, FormName] = {
    Op.ALL_REDUCE: "sum",
    Op.ALL_GATHER: "gather",
    Op.ALL_TO_ALL: "deliver",
}


def measure_codec(
    spec_text: str,
    num_workers: int,
    *,
    sizes: Sequence[int] = SIZES,
    merges: bool = False,
    warmup: int = 1,
    repeats: int = 3,
    typical: bool = False,
    device: str = "cpu",
    clock: Callable[[], float] = time.perf_counter,
) -> CodecCost:
    """Seconds and bytes of a compressor at some message sizes, on the threads that torch has now.

    All ranks take turns in this process. A stage's time is the least over ranks and repeats, since
    their work is alike and other load on the machine only adds; with `typical` it is the median.
    Values are normal draws, new in each step, so the result does not depend on how sparse or smooth
    real gradients are. Steps behind the warm-up are timed, in which residuals and bases exist.

    Args:
        spec_text: the compressor.
        num_workers: n, as many as are to be predicted for.
        sizes: elements of the messages (float32), ascending.
        merges: whether a server would merge what ranks gather: then the payload that it sends back
            is made and weighed, and decoded instead of those of all ranks.
        warmup: steps that are not timed.
        repeats: steps that are.
        typical: medians instead of the least.
        device: where the values are; the time of a GPU counts until it has computed.
        clock: tells the time in seconds.

    Raises:
        UsageError: an unknown compressor, no worker or no size.
    """
    if num_workers < 1 or not sizes or min(sizes) < 1:
        raise UsageError(
            f"measuring {spec_text!r} for {num_workers} workers at sizes {tuple(sizes)}; expected "
            "one worker and one size or more"
        )
    compressor = COMPRESSORS.resolve(spec_text).build()
    samples = []
    for num_elements in sorted(sizes):
        job = _Job(compressor, num_workers, num_elements, merges, torch.device(device), clock)
        steps = [job.step() for _ in range(warmup + repeats)]
        samples.append(
            _summed_up(num_elements, steps[warmup:], statistics.median if typical else min)
        )
    return CodecCost(
        compressor=spec_text,
        num_workers=num_workers,
        device=torch.device(device).type,
        ratio=_ratio(compressor),
        samples=tuple(samples),
    )


def _ratio(compressor: Compressor) -> float | None:
    try:
        return ratio_of(compressor)
    except UsageError:  # raised where there is none
        return None


@dataclass
class _Step:
    """Of one exchange: seconds of each stage, of each rank, and its rounds."""

    compute_s: list[list[float]] = field(default_factory=list)
    rounds: list[RoundCost] = field(default_factory=list)


@dataclass
class _Job:
    """N ranks that exchange one message in each step."""

    compressor: Compressor
    num_workers: int
    num_elements: int
    merges: bool
    device: torch.device
    clock: Callable[[], float]
    states: list[State] = field(default_factory=list)
    count: int = 0

    def step(self) -> _Step:
        """One exchange of all ranks."""
        self.states = self.states or [{} for _ in range(self.num_workers)]
        draw = torch.Generator().manual_seed(self.count)
        values = [
            torch.randn(self.num_elements, generator=draw).to(self.device)
            for _ in range(self.num_workers)
        ]
        conversations = [
            self.compressor.exchange(v, s, replace(self._context(rank), out=v))
            for rank, (v, s) in enumerate(zip(values, self.states, strict=True))
        ]
        found = _Step()
        answers: list[Arrived] | None = None
        while True:
            rounds, ended = self._advance(conversations, values, answers, found)
            if ended:
                self.states = [done.state for done in ended]
                self.count += 1
                return found
            answers = self._answered(rounds, values[0], found)

    def _advance(
        self,
        conversations: Sequence[Conversation],
        values: Sequence[torch.Tensor],
        answers: list[Arrived] | None,
        found: _Step,
    ) -> tuple[list[Round], list[Exchanged]]:
        rounds: list[Round] = []
        ended: list[Exchanged] = []
        seconds = []
        for rank, each in enumerate(conversations):
            start_s = self._now_s()
            try:
                rounds.append(next(each) if answers is None else each.send(answers[rank]))
            except StopIteration as stop:
                ended.append(stop.value)
                if stop.value.mean is not values[rank]:  # as in training
                    values[rank].copy_(stop.value.mean)
            seconds.append(self._now_s() - start_s)
        found.compute_s.append(seconds)
        return rounds, ended

    def _answered(self, rounds: list[Round], like: torch.Tensor, found: _Step) -> list[Arrived]:
        handed = [handed_over_bytes(given, rank) for rank, given in enumerate(rounds)]
        merger, merged_bytes, merge_s = rounds[0].merger, 0, 0.0
        if self.merges and merger is not None:
            start_s = self._now_s()
            payloads = tuple(given.parts[0] for given in rounds)
            pulled = merge(merger, payloads, like, {}, self._context(len(rounds)))[0].payload
            merge_s, merged_bytes = self._now_s() - start_s, pulled.numel()
            self._add_cuts(merger, payloads, like, found)
            answers = [Arrived(pulled=pulled) for _ in rounds]
        else:
            answers = carry_out(rounds)
        found.rounds.append(
            RoundCost(
                form=_FORMS[rounds[0].op],
                num_bytes=statistics.fmean(handed),
                merged_bytes=merged_bytes,
                merge_s=merge_s,
                can_cut=merger is not None and can_cut(merger),
            )
        )
        return answers

    def _add_cuts(
        self,
        merger: Merger,
        payloads: tuple[torch.Tensor, ...],
        like: torch.Tensor,
        found: _Step,
    ) -> None:
        """What cutting takes is part of encoding; as many servers as workers are assumed."""
        bounds = bounds_of(merger, like, self.num_workers)
        if len(bounds) == 2:
            return
        assert can_cut(merger)
        for rank, payload in enumerate(payloads):
            start_s = self._now_s()
            merger.cut(payload, like, bounds)
            found.compute_s[-1][rank] += self._now_s() - start_s

    def _now_s(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.clock()

    def _context(self, rank: int) -> Context:
        return Context(
            rank=rank,
            num_workers=self.num_workers,
            step=BEHIND_WARM_UP + self.count,
            key="message",
            learning_rate=1.0,
        )


def _summed_up(
    num_elements: int, steps: Sequence[_Step], of_all: Callable[[Iterable[float]], float]
) -> CodecSample:
    """One figure of all seconds, means of the bytes; rounds as in the last step."""
    last = steps[-1]
    alike = [s for s in steps if [r.form for r in s.rounds] == [r.form for r in last.rounds]]
    return CodecSample(
        num_elements=num_elements,
        compute_s=tuple(
            of_all(chain.from_iterable(stage))
            for stage in zip(*(s.compute_s for s in alike), strict=True)
        ),
        rounds=tuple(
            msgspec.structs.replace(
                each[0],
                num_bytes=statistics.fmean(r.num_bytes for r in each),
                merged_bytes=statistics.fmean(r.merged_bytes for r in each),
                merge_s=of_all(r.merge_s for r in each),
            )
            for each in zip(*(s.rounds for s in alike), strict=True)
        ),
    )
