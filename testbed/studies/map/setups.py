"""The simulated setups of the map, and which compressor is fastest in each; pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from testbed.base.axes import BACKENDS
from testbed.base.files import load_shipped_trace
from testbed.base.trace import Trace
from testbed.prediction.algorithms import algorithm_of, parse_algorithm
from testbed.prediction.break_even import MIN_GAIN
from testbed.prediction.codec import CodecCost, sped_up
from testbed.prediction.nominal import Nominal
from testbed.scheduling.break_even import Predictions

MODELS: Final = (
    "resnet50-v100",
    "resnet101-v100",
    "vgg16bn-v100",
    "densenet201-2080ti",
    "inception-v4-2080ti",
    "bert-base-2080ti",
)
WORKERS: Final = (4, 8, 16, 32)
RATES: Final = ("100mbit", "1gbit", "5gbit", "10gbit", "25gbit", "100gbit")
LATENCIES: Final = ("10us", "100us", "1ms")
DENSE, HALF = "none", "bf16"
# Beyond dense messages. Low-rank ones are missing: their cost depends on the tensors' shapes.
CODECS: Final = (
    "fp16",
    HALF,
    "qsgd:bits=4",
    "ef+onebit",
    "ef+topk:ratio=0.01",
    "ef+randomk:ratio=0.01",
)
SPEEDS: Final = (1.0, 10.0)  # how many times as fast as recorded
# Dense and compressed messages choose the fastest of the same schedules.
SCHEDULERS: Final = ("sequential", "wfbp", "bucket", "mg-wfbp")
BACKEND: Final = "mpi-ring"


@dataclass(frozen=True)
class Setup:
    """A model on a network.

    Attributes:
        model: name of a shipped trace.
        workers: n, in one ring.
        rate: of each interface, each direction.
        latency: of one point-to-point message.
        speed: encoding and decoding, as a multiple of what was recorded.
    """

    model: str
    workers: int
    rate: str
    latency: str
    speed: float = 1.0


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One setup under one codec.

    Attributes:
        model: see `Setup`.
        workers: likewise.
        rate: likewise.
        latency: likewise.
        speed: likewise.
        codec: specification; `none` = dense messages.
        scheduler: the fastest.
        step_s: of that.
        over_dense: step of dense messages over this one.
        over_bf16: likewise.
    """

    model: str
    workers: int
    rate: str
    latency: str
    speed: float
    codec: str
    scheduler: str
    step_s: float
    over_dense: float
    over_bf16: float


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a setup says.

    Attributes:
        setup: model, workers, rate, latency, speed.
        codec: `none` where no codec gains 1 % on dense messages; `bf16` where one does, and no
            codec gains 1 % on bf16; else the fastest.
        over_dense: its gain, a ratio of times.
        over_bf16: likewise.
    """

    setup: tuple[str, int, str, str, float]
    codec: str
    over_dense: float
    over_bf16: float


def setups(
    models: Sequence[str] = MODELS,
    workers: Sequence[int] = WORKERS,
    rates: Sequence[str] = RATES,
    latencies: Sequence[str] = LATENCIES,
    speeds: Sequence[float] = SPEEDS,
) -> tuple[Setup, ...]:
    """All combinations; the speed varies fastest.

    Example:
        >>> len(setups()) * (1 + len(CODECS))
        6048
    """
    return tuple(
        Setup(*each) for each in itertools.product(models, workers, rates, latencies, speeds)
    )


def simulate(chosen: Iterable[Setup], costs: Sequence[CodecCost]) -> Iterator[Point]:
    """Every setup dense and under every codec.

    The network is nominal: T(M) = 2 (n - 1) latency + 2 (n - 1) / n M headers 8 / rate (`Nominal`).

    Args:
        chosen: setups.
        costs: recorded, of each codec for each number of workers.
    """
    traces: dict[str, Trace] = {}
    of_workers: dict[int, list[CodecCost]] = {}
    for cost in costs:
        of_workers.setdefault(cost.num_workers, []).append(cost)
    for setup in chosen:
        if setup.model not in traces:
            traces[setup.model] = load_shipped_trace(setup.model)
        yield from _points(setup, traces[setup.model], of_workers[setup.workers])


def _points(setup: Setup, trace: Trace, costs: Sequence[CodecCost]) -> list[Point]:
    link = Nominal(setup.rate, setup.latency).link(BACKEND, setup.workers)
    channels = BACKENDS.resolve(BACKEND).facts.max_channels
    algorithm = parse_algorithm(algorithm_of(BACKEND))
    predicted = Predictions(trace, link, algorithm, SCHEDULERS, channels)
    found = {DENSE: predicted.best_dense()} | {
        cost.compressor: predicted.best_compressed(sped_up(cost, setup.speed)) for cost in costs
    }
    dense_s, half_s = found[DENSE][0], found[HALF][0]
    return [
        Point(
            model=setup.model,
            workers=setup.workers,
            rate=setup.rate,
            latency=setup.latency,
            speed=setup.speed,
            codec=codec,
            scheduler=scheduler,
            step_s=step_s,
            over_dense=dense_s / step_s,
            over_bf16=half_s / step_s,
        )
        for codec, (step_s, scheduler) in found.items()
    ]


def answers(points: Iterable[Point]) -> list[Answer]:
    """Of each setup, in the order of the points.

    Example:
        >>> def point(codec: str, step_s: float) -> Point:
        ...     return Point(model="m", workers=4, rate="1gbit", latency="10us", speed=1.0,
        ...                  codec=codec, scheduler="wfbp", step_s=step_s,
        ...                  over_dense=2 / step_s, over_bf16=1 / step_s)
        >>> [a.codec for a in answers([point("none", 2), point("bf16", 1), point("topk", 0.995)])]
        ['bf16']
    """
    groups: dict[tuple[str, int, str, str, float], dict[str, Point]] = {}
    for p in points:
        key = (p.model, p.workers, p.rate, p.latency, p.speed)
        groups.setdefault(key, {})[p.codec] = p
    return [_answer(key, found) for key, found in groups.items()]


def _answer(key: tuple[str, int, str, str, float], found: Mapping[str, Point]) -> Answer:
    best = min(found.values(), key=lambda point: point.step_s)
    if best.over_bf16 < 1 + MIN_GAIN:
        best = found[HALF]
    if best.over_dense < 1 + MIN_GAIN:
        best = found[DENSE]
    return Answer(setup=key, codec=best.codec, over_dense=best.over_dense, over_bf16=best.over_bf16)
