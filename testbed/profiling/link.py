"""Measures the time of messages on an opened backend; collective over its workers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from statistics import fmean, median

import msgspec
import torch

from testbed.backends.protocol import Backend
from testbed.base.errors import UsageError
from testbed.base.link import PROCESSOR_TIMES, Link
from testbed.base.types import Op, Request
from testbed.control.protocol import Control, gather
from testbed.noise.steady import quietest
from testbed.noise.steal_time import StealTime
from testbed.prediction.fit import fit_link, fit_slowdown
from testbed.profiling.sweep import (
    LEAD_BYTES,
    Exchange,
    LinkSweep,
    exchanges_of,
    num_rounds,
    of_job,
    quick,
    shares_of,
    shuffled,
    time_of_one,
)

KEY = "link"
SHORTEST_S = 1e-7  # between two ends that the clock cannot resolve
LEAST_ROUNDS = 3  # a median needs more than one
COST_BYTES, ROW_MESSAGES, COST_ROWS = 1024, 16, 7  # to tell what a message costs the processor


def measure_link(
    backend: Backend,
    control: Control,
    *,
    num_workers: int,
    deadline_s: float,
    name: str = "unnamed",
    sweep: LinkSweep | None = None,
    device: str = "cpu",
) -> Link:
    """Start-up and per-byte time of a sum, and how concurrent sums slow each other.

    Every rank calls it at the same point and gets rank 0's fit. After the backend's own barrier
    messages of one size are submitted in a row, and what each takes behind the first one counts
    (`sweep.time_of_one`; of several at once, and of the one that they are compared with, all
    count); the largest go alone, from the barrier to the end on the slowest rank.
    Sizes take turns in a random order that all ranks share. The messages of `sweep.stream` follow
    each other as those of a step do, and each is a sample of its size. Times are told over the
    control plane between exchanges, never during one. Of rounds that the host of a virtual machine
    disturbed only the quietest count (`steady.quietest`). The first exchange of each size is not a
    sample: it allocates and connects, and its time only decides what the budget allows.

    Processor times of a message are told by the clocks of threads, not by wall time: rows of small
    messages are submitted and then waited for, apart from the others (`_Measurement.take_costs`).

    Concurrent messages are measured where the backend was opened with several channels; without,
    `Link.concurrency_slowdown` is None: one message at a time is all there is.

    Args:
        backend: opened, with nothing under way.
        control: the job's control plane.
        num_workers: n; with one worker nothing is measured.
        deadline_s: within which an exchange must be done and the ranks must answer.
        name: of the backend, for the link.
        sweep: what to send; None = `quick()`.
        device: where the tensors are: `cpu`, or `cuda:<index>`.

    Returns:
        The link; `Link.extra` holds the `fit` with its residuals, and `measured` with what was
        sent.

    Raises:
        UsageError: the backend cannot sum, or moves nothing.
        RankLost, DeadlineExceeded: as `Work.wait` and `Control.all_gather`.
    """
    lacking = {Op.ALL_REDUCE, Op.BARRIER} - backend.capabilities.ops
    if lacking or not backend.capabilities.exchanges:
        raise UsageError(
            f"backend {name!r} moves no sums; there is no link to measure: choose another backend"
        )
    if num_workers == 1:
        return fit_link(name, 1, ())
    chosen = sweep or quick()
    measurement = _Measurement(backend, control, chosen, deadline_s, device)
    sizes, round_s = measurement.probe()
    rounds = num_rounds(chosen, round_s + measurement.try_stream())
    times = measurement.take_rounds(sizes, rounds)
    streams = [*itertools.chain(*measurement.take_streams(rounds))]
    costs = measurement.take_costs()
    link = None
    if backend.rank == 0:
        fitted = _fit(name, num_workers, times, streams)
        link = msgspec.structs.replace(fitted, **costs)
    told = control.all_gather(
        "link", msgspec.json.encode(link), _fitting_s(deadline_s), members=num_workers
    )
    return msgspec.json.decode(told[0], type=Link)


def _fitting_s(deadline_s: float) -> float:
    """Time for rank 0 to fit, about a second; a lost rank ends the wait earlier."""
    return max(deadline_s, 30.0)


Times = list[tuple[Exchange, float]]


class _Measurement:
    """The exchanges of one rank; all ranks do the same ones in the same order."""

    def __init__(
        self,
        backend: Backend,
        control: Control,
        sweep: LinkSweep,
        deadline_s: float,
        device: str,
    ) -> None:
        self._backend = backend
        self._control = control
        self._sweep = sweep
        self._deadline_s = deadline_s
        self._step = -1
        self._concurrent = min(sweep.max_concurrent, backend.capabilities.num_channels)
        largest = max(*sweep.sizes, sweep.concurrent_bytes, *sweep.stream, LEAD_BYTES)
        self._tensors = [
            torch.zeros(n // 4, device=device)
            for n in [largest, *[max(sweep.concurrent_bytes, LEAD_BYTES)] * (self._concurrent - 1)]
        ]

    def probe(self) -> tuple[list[int], float]:
        """The sizes that the budget allows, and how long a round of them takes.

        From small to large, and no further once a single exchange takes so long that the least
        number of rounds of all sizes so far would not fit.
        """
        self._control.state = "probing the link"
        fitting: list[int] = []
        round_s = 0.0
        for size in self._sweep.sizes:
            time_s = self._try(Exchange(size))
            allowed = len(fitting) < 2 or self._fits(round_s + time_s)
            if not allowed:
                break
            fitting.append(size)
            round_s += time_s
        for exchange in self._exchanges(fitting)[len(fitting) :]:
            round_s += self._try(exchange)
        return fitting, round_s

    def _try(self, exchange: Exchange) -> float:
        """Seconds of the exchange, all of its row, on the slowest rank."""
        begin_s = time.perf_counter()
        self._exchange(exchange)
        (times_s,) = self._gather([time.perf_counter() - begin_s])
        return max(times_s)

    def _fits(self, round_s: float) -> bool:
        return round_s * self._sweep.min_repeats <= self._sweep.budget_s

    def _exchanges(self, sizes: Sequence[int]) -> list[Exchange]:
        together = max(LEAD_BYTES, min(self._sweep.concurrent_bytes, sizes[-1]))
        return exchanges_of(sizes, self._concurrent, together)

    def take_rounds(self, sizes: Sequence[int], rounds: int) -> Times:
        """All samples of quiet rounds, each of its slowest rank."""
        self._control.state = "measuring the link"
        mine: list[Times] = []
        stolen = []
        taken = StealTime()
        for number in range(rounds):
            order = shuffled(self._exchanges(sizes), self._sweep.seed, number)
            mine.append([self._exchange(exchange) for exchange in order])
            stolen.append(taken.share())
        counted = [mine[number] for number in self._quiet(stolen)]
        return self._tell([*itertools.chain(*counted)])

    def take_streams(self, rounds: int) -> list[list[tuple[int, float]]]:
        """Bytes and seconds of the messages of quiet rounds behind the first of each stream."""
        taken = StealTime()
        every = [(self._stream(), taken.share()) for _ in range(rounds)]
        mine = [every[number][0] for number in self._quiet([share for _, share in every])]
        told = iter(self._gather([time_s for streamed in mine for _, time_s in streamed]))
        return [[(num_bytes, fmean(next(told))) for num_bytes, _ in streamed] for streamed in mine]

    def take_costs(self) -> dict[str, float]:
        """Processor time of one message, by the name of the link's field: `PROCESSOR_TIMES`.

        Of each rank the median over rows, of the ranks the largest: all wait for the slowest. What
        the process's other threads take meanwhile is the backend's, a colocated server's included.
        """
        self._control.state = "measuring what a message costs the processor"
        rows = [self._cost_row() for _ in range(COST_ROWS)]
        mine = [median(column) / ROW_MESSAGES for column in zip(*rows, strict=True)]
        return dict(zip(PROCESSOR_TIMES, map(max, self._gather(mine)), strict=True))

    def _cost_row(self) -> tuple[float, float, float]:
        """Seconds of the processor for a row of messages: submitting, taking results, elsewhere."""
        self._begin()
        requests = [self._sum(COST_BYTES, f"cost/{i}") for i in range(ROW_MESSAGES)]
        whole_s, begun_s = time.process_time(), time.thread_time()
        works = [self._backend.submit(request) for request in requests]
        submitted_s = time.thread_time()
        for work in works:
            work.wait(self._deadline_s)
        taken_s = time.thread_time()
        others_s = (time.process_time() - whole_s) - (taken_s - begun_s)
        return submitted_s - begun_s, taken_s - submitted_s, max(0.0, others_s)

    def try_stream(self) -> float:
        """Seconds of a stream behind its first message, on the slowest rank."""
        (times_s,) = self._gather([sum(time_s for _, time_s in self._stream())])
        return max(times_s)

    def _stream(self) -> list[tuple[int, float]]:
        self._begin()
        ended_s = self._send(
            self._sum(num_bytes, f"stream/{place}", priority=place)
            for place, num_bytes in enumerate(self._sweep.stream)
        )
        ends = sorted(zip(ended_s, self._sweep.stream, strict=True))
        return [
            (num_bytes, max(end_s - before_s, SHORTEST_S))
            for (before_s, _), (end_s, num_bytes) in itertools.pairwise(ends)
        ]

    def _begin(self) -> None:
        """A barrier before the next exchange."""
        self._step += 1
        self._send([Request(Op.BARRIER, key=f"{KEY}/begin", step=self._step)])

    def _sum(self, num_bytes: int, name: str, channel: int = 0, priority: int = 0) -> Request:
        tensor, key = self._tensors[channel][: num_bytes // 4], f"{KEY}/{name}"
        return Request(Op.ALL_REDUCE, tensor, key, self._step, priority, channel)

    def _send(self, requests: Iterable[Request]) -> list[float]:
        """When each of them had ended, all submitted before the first is waited for."""
        works = [self._backend.submit(request) for request in requests]
        for work in works:
            work.wait(self._deadline_s)
        return [work.event.ended_s for work in works]

    def _exchange(self, exchange: Exchange) -> tuple[Exchange, float]:
        self._begin()
        start_s, num_bytes = time.perf_counter(), exchange.num_bytes
        ended_s = self._send(
            self._sum(
                num_bytes if place else exchange.lead_bytes,
                f"{num_bytes}/{channel}/{place}",
                channel,
            )
            for place in range(exchange.num_in_row)
            for channel in range(exchange.num_messages)
        )
        return exchange, time_of_one(exchange, start_s, ended_s)

    def _quiet(self, stolen: list[float]) -> list[int]:
        """Which rounds count, by what was taken of the cores of the rank that lost most."""
        return quietest([max(shares) for shares in self._gather(stolen)], LEAST_ROUNDS)

    def _tell(self, mine: Times) -> Times:
        """The same exchanges with one time for all ranks (`of_job`)."""
        told = self._gather([time_s for _, time_s in mine])
        return [
            (exchange, of_job(exchange, times))
            for (exchange, _), times in zip(mine, told, strict=True)
        ]

    def _gather(self, times_s: list[float]) -> list[tuple[float, ...]]:
        """For each of my times those of all ranks."""
        deadline_s, size = self._deadline_s, self._backend.size
        of_ranks = gather(self._control, "link times", times_s, list[float], deadline_s, size)
        return list(zip(*of_ranks, strict=True))


def _fit(name: str, num_workers: int, times: Times, streamed: Sequence[tuple[int, float]]) -> Link:
    alone = [(e.num_bytes, t) for e, t in times if e.row is None]
    link = fit_link(name, num_workers, [*alone, *streamed], shares_of(streamed))
    samples = [(e.num_messages, e.num_bytes, t) for e, t in times if e.row is not None]
    together = {num_bytes for _, num_bytes, _ in samples}
    measured = {"num_samples": len(times), "concurrent_bytes": max(together, default=None)}
    return msgspec.structs.replace(
        link,
        concurrency_slowdown=fit_slowdown(link, samples) if samples else None,
        extra={**link.extra, "measured": measured},
    )
