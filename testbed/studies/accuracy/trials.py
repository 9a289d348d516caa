"""One training run under compression: what was asked for, and what came out; means over runs."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
from scipy import stats


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One run, given completely.

    Attributes:
        method: its name in the tables.
        compressor: its specification; every parameter of the model is a message of its own.
        learning_rate: of the optimizer, constant.
        momentum: of the optimizer, after the exchange.
        seed: of initial weights, sample order and draws.
        part: `search` trains on a part of the training samples and is judged by the rest;
            `final` trains on all of them and is judged by the test samples.
        workload: what is trained.
        workers: N.
        batch_size: samples per worker and step.
        epochs: passes over the training samples, where `steps` is 0.
        steps: of the optimizer; 0: `epochs` tell.
        warmup_steps: of them, over which the rate rises to `learning_rate`.
        evaluate_every: steps from one judging by the loss to the next; 0: it is not judged by it.
    """

    method: str
    compressor: str
    learning_rate: float
    momentum: float
    seed: int
    part: Literal["search", "final"]
    workload: str = "digits-cnn"
    workers: int = 4
    batch_size: int = 32
    epochs: int = 30
    steps: int = 0
    warmup_steps: int = 0
    evaluate_every: int = 0

    @property
    def key(self) -> str:
        """The name of the run's files: a digest of all of this."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a trial arrived at.

    Attributes:
        trial: what was run.
        accuracy: share of the judging samples that the model gets right at the end.
        loss: mean training loss of the last epoch; None: it was not finite.
        steps: optimizer steps.
        dense_bytes: gradient bytes per step and rank.
        sent_bytes: payload bytes that one rank hands over per step, mean over steps and ranks.
        state_bytes: what each rank keeps between steps, at the end.
        cpu_s: processor seconds.
        diverged: a gradient was not finite; the model is that of the step before.
        curve: (steps, mean loss of the judging samples) in the course of the training.
    """

    trial: Trial
    accuracy: float
    loss: float | None
    steps: int
    dense_bytes: int
    sent_bytes: float
    state_bytes: int
    cpu_s: float
    diverged: bool = False
    curve: tuple[tuple[int, float], ...] = ()

    @property
    def judged_loss(self) -> float:
        """Mean loss of the judging samples at the end; infinite where it diverged."""
        return math.inf if self.diverged or not self.curve else self.curve[-1][1]


Done = Mapping[Trial, Outcome]


@dataclass(frozen=True)
class Mean:
    """A mean and half the width of its 95 % interval, which is infinite for one sample.

        mean +- t(0.975, n - 1) s / sqrt(n)

    Reference:
        Student, 1908, Biometrika.

    Example:
        >>> found = Mean.of([1.0, 2.0, 3.0])
        >>> round(found.mean, 3), round(found.half_width, 3)
        (2.0, 2.484)
    """

    mean: float
    half_width: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Mean:
        """Of one sample and more."""
        count = len(samples)
        if count < 2:
            return cls(samples[0], math.inf)
        error = statistics.stdev(samples) / math.sqrt(count)
        return cls(statistics.fmean(samples), float(stats.t.ppf(0.975, count - 1)) * error)

    def scaled(self, factor: float, digits: int = 2) -> str:
        """As text; of one sample the mean alone."""
        text = f"{self.mean * factor:.{digits}f}"
        if math.isinf(self.half_width):
            return text
        return f"{text} ± {self.half_width * factor:.{digits}f}"
