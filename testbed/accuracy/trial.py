"""One training run under compression: what was asked for, and what came out."""

from __future__ import annotations

from typing import Literal

import msgspec


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
        epochs: passes over the training samples.
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
