"""Trains the trials of the study side by side, and keeps each outcome as soon as it is there."""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TextIO

import msgspec
import numpy as np
import torch

from testbed.base.axes import COMPRESSORS
from testbed.base.config import RunConfig
from testbed.base.errors import NonFiniteGradient, UsageError
from testbed.base.files import to_json
from testbed.compression.common import num_bytes
from testbed.compression.lockstep import Lockstep
from testbed.records.store import write_atomically
from testbed.studies.accuracy.plan import Comparison, Outcome, Trial, methods, to_markdown
from testbed.sweeping.study import Study
from testbed.training.evaluation import accuracy_of
from testbed.training.replica import (
    Replica,
    backward,
    make_replica,
    num_steps,
    sample_order,
    update,
)
from testbed.training.sampling import SampleCursor
from testbed.workloads.load import load_workload
from testbed.workloads.workload import Samples, Workload

# N workers in one process that exchange compressed gradients in lockstep.

HELD_OUT = 0.2
_SPLIT_SEED = 7


@dataclass(frozen=True)
class Chosen:
    """Some of the samples of another set."""

    whole: Samples
    places: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.places)

    def batch(self, indices: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """See `Samples.batch`."""
        return self.whole.batch([self.places[i] for i in indices])


def held_out(workload: Workload) -> Workload:
    """The workload with a fifth of its training samples as its test samples, the same for all.

    What is chosen by these has not seen the real test samples.
    """
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(workload.train))
    places = tuple(int(i) for i in order)
    cut = round(len(places) * HELD_OUT)
    return replace(
        workload,
        train=Chosen(workload.train, places[cut:]),
        test=Chosen(workload.train, places[:cut]),
    )


def run_trial(trial: Trial) -> Outcome:
    """Train as N workers would: each one's gradient on its own samples, exchanged compressed.

    One process plays all workers in turn; the exchange is the reference driver's
    (`compression.lockstep`), so payloads and states are the real ones and nothing is sent.

    Raises:
        UsageError: a model with buffers, which workers would not share; an unknown compressor.
    """
    started = time.process_time()
    workload = load_workload(trial.workload, seed=trial.seed)
    if trial.part == "search":
        workload = held_out(workload)
    if next(workload.model.buffers(), None) is not None:
        raise UsageError(
            f"{trial.workload} has buffers, of which each worker needs its own; expected a model "
            "without (batch normalisation has some), for example digits-cnn"
        )
    config = _configuration(trial)
    order = sample_order(config, workload, trial.workers)
    steps = num_steps(config, order)
    replica = make_replica(workload, config, steps)
    replica.model.train()
    workers = Workers(
        replica,
        [SampleCursor(order, rank) for rank in range(trial.workers)],
        _messages(trial, replica),
    )
    taken = _train(workers, steps, order.steps_per_epoch)
    diverged = taken < steps
    loss = math.nan if diverged or not workers.losses else sum(workers.losses) / len(workers.losses)
    per_step = trial.workers * max(1, taken)
    accuracy = accuracy_of(replica)
    assert accuracy is not None
    return Outcome(
        trial=trial,
        accuracy=accuracy,
        loss=loss if math.isfinite(loss) else None,
        steps=taken,
        dense_bytes=sum(p.numel() * p.element_size() for p in replica.model.parameters()),
        sent_bytes=sum(sum(m.given_bytes) for m in workers.messages) / per_step,
        state_bytes=sum(num_bytes(m.states[0]) for m in workers.messages if m.states),
        cpu_s=time.process_time() - started,
        diverged=diverged,
    )


@dataclass
class Workers:
    """The model, each worker's samples, and each parameter's exchange.

    `losses` holds the losses of the steps since it was last cleared.
    """

    replica: Replica
    cursors: list[SampleCursor]
    messages: list[Lockstep]
    losses: list[float] = field(default_factory=list)

    def step(self, step: int) -> None:
        """All workers' gradients, their exchange, one optimizer step."""
        parameters = list(self.replica.model.parameters())
        gradients: list[list[torch.Tensor]] = []
        for cursor in self.cursors:
            self.losses.append(backward(self.replica, cursor.indices(step), 1))
            gradients.append([_gradient(p) for p in parameters])
            self.replica.optimizer.zero_grad(set_to_none=True)
        (rate,) = {group["lr"] for group in self.replica.optimizer.param_groups}
        means = [
            message.exchange(values, rate)[0].mean
            for message, values in zip(self.messages, zip(*gradients, strict=True), strict=True)
        ]
        for parameter, mean in zip(parameters, means, strict=True):
            parameter.grad = mean.view_as(parameter)
        update(self.replica, None)


def _train(workers: Workers, steps: int, steps_per_epoch: int) -> int:
    """How many steps could be taken before a gradient was not finite."""
    for step in range(steps):
        if step % steps_per_epoch == 0:
            workers.losses.clear()
        try:
            workers.step(step)
        except NonFiniteGradient:  # a rate that is too high is a result, and ends the run
            return step
    return steps


def _configuration(trial: Trial) -> RunConfig:
    return RunConfig(
        workload=trial.workload,
        workers=trial.workers,
        epochs=trial.epochs,
        batch_size=trial.batch_size,
        learning_rate=trial.learning_rate,
        momentum=trial.momentum,
        seed=trial.seed,
    )


def _messages(trial: Trial, replica: Replica) -> list[Lockstep]:
    """One for each parameter, with draws of its own."""
    compressor = COMPRESSORS.resolve(trial.compressor).build()
    return [
        Lockstep(
            compressor,
            trial.workers,
            seed=trial.seed * 1_000_003 + index,
            shapes=(tuple(parameter.shape),),
        )
        for index, parameter in enumerate(replica.model.parameters())
    ]


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    grad = parameter.grad
    return (torch.zeros_like(parameter) if grad is None else grad.detach()).reshape(-1)


FILE = "accuracy-compressed.json"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """`testbed.accuracy/1`: all outcomes so far, in the order in which they came."""

    schema: Literal["testbed.accuracy/1"] = "testbed.accuracy/1"
    outcomes: tuple[Outcome, ...] = ()


def read_record(path: Path) -> Record:
    """What was kept; an empty record where there is no file.

    Raises:
        UsageError: the file is no record of this schema.
    """
    if not path.exists():
        return Record()
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except msgspec.DecodeError as error:
        raise UsageError(
            f"{path} is no testbed.accuracy/1 ({error}); give a new folder, or one that an earlier "
            "run of this study left"
        ) from error


def complete(
    comparison: Comparison, path: Path | None, num_processes: int, progress: TextIO = sys.stderr
) -> Record:
    """Run what lacks in the record, the searches first.

    Args:
        comparison: what is to be run.
        path: of the record, written after each trial; None: nothing is kept.
        num_processes: trials at a time, each in a process of its own on one thread; 1: in this
            process, on the threads that torch has.
        progress: a line for each trial.
    """
    record = Record() if path is None else read_record(path)
    outcomes = {outcome.trial: outcome for outcome in record.outcomes}

    def keep(outcome: Outcome) -> None:
        outcomes[outcome.trial] = outcome
        if path is not None:
            write_atomically(path, to_json(Record(outcomes=tuple(outcomes.values()))))
        t = outcome.trial
        progress.write(
            f"{len(outcomes):4d} {t.part} {t.method}: rate {t.learning_rate:g}, momentum "
            f"{t.momentum:g}, seed {t.seed}: {outcome.accuracy:.4f} in {outcome.cpu_s:.1f} s\n"
        )
        progress.flush()

    for wanted in (comparison.search, lambda: comparison.final(outcomes)):
        lacking = [trial for trial in wanted() if trial not in outcomes]
        _run_all(lacking, num_processes, keep)
    return Record(outcomes=tuple(outcomes.values()))


def cores() -> int:
    """How many trials run at a time here: the cores that this process may use, at most 2."""
    return min(2, len(os.sched_getaffinity(0)))


def _run_all(trials: Sequence[Trial], num_processes: int, keep: Callable[[Outcome], None]) -> None:
    if num_processes == 1:
        for trial in trials:
            keep(run_trial(trial))
        return
    if not trials:
        return
    # Fresh processes: a fork would copy torch's thread pool in whatever state it is.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, context, torch.set_num_threads, (1,)) as pool:
        futures = [pool.submit(run_trial, trial) for trial in trials]
        try:
            for future in as_completed(futures):
                keep(future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


# The study `accuracy-compressed`: final accuracy of compressors beside that of dense SGD.


def _files(folder: Path | None = None) -> Mapping[str, str]:
    comparison = Comparison(methods())
    record = complete(comparison, None if folder is None else folder / FILE, cores())
    return {
        FILE.replace(".json", ".md"): to_markdown(comparison, record.outcomes),
        FILE: to_json(record).decode(),
    }


ACCURACY_COMPRESSED = Study(
    name="accuracy-compressed",
    summary="digits-cnn under each compressor: rates searched, 30 epochs, 6 seeds, beside dense",
    compute=_files,
    go_on=_files,
)
