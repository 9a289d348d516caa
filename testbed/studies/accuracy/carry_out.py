"""Trains the trials of a study, in as many processes as wanted, and keeps each outcome at once."""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TextIO

import numpy as np
import torch

from testbed.base.axes import COMPRESSORS
from testbed.base.config import RunConfig
from testbed.base.errors import NonFiniteGradient, UsageError
from testbed.compression.common import num_bytes
from testbed.compression.lockstep import Lockstep
from testbed.studies.accuracy.kept import Kept, Record
from testbed.studies.accuracy.trials import Done, Outcome, Trial
from testbed.training.evaluation import accuracy_of, loss_of
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

    What is chosen by these has not seen the real test samples. No more of them are used than there
    are test samples.
    """
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(workload.train))
    places = tuple(int(i) for i in order)
    cut = round(len(places) * HELD_OUT)
    return replace(
        workload,
        train=Chosen(workload.train, places[cut:]),
        test=Chosen(workload.train, places[: min(cut, len(workload.test))]),
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
    curve: list[tuple[int, float]] = []

    def judge(done: int) -> None:
        if trial.evaluate_every and done % trial.evaluate_every == 0:
            judged = loss_of(replica)
            if judged is not None and math.isfinite(judged):
                curve.append((done, judged))

    taken = _train(workers, steps, order.steps_per_epoch, judge)
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
        curve=tuple(curve),
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


def _train(workers: Workers, steps: int, epoch: int, judge: Callable[[int], None]) -> int:
    """How many steps could be taken before a gradient was not finite; `judge` follows each."""
    for step in range(steps):
        if step % epoch == 0:
            workers.losses.clear()
        try:
            workers.step(step)
        except NonFiniteGradient:  # a rate that is too high is a result, and ends the run
            return step
        judge(step + 1)
    return steps


def _configuration(trial: Trial) -> RunConfig:
    return RunConfig(
        workload=trial.workload,
        workers=trial.workers,
        epochs=None if trial.steps else trial.epochs,
        steps=trial.steps or None,
        warmup_steps=trial.warmup_steps,
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


class Planned(Protocol):
    """What a study wants to be run."""

    def wanted(self, done: Done) -> Sequence[Trial]:
        """All trials that what is done calls for, itself included; nothing new: it is complete."""
        ...


def complete(
    planned: Planned,
    folder: Path | None,
    record: str,
    num_processes: int,
    progress: TextIO = sys.stderr,
) -> Record:
    """Run what lacks in the folder, beside other processes that may do the same there.

    Args:
        planned: what is to be run.
        folder: of the outcomes; None: nothing is kept.
        record: name of the file with all outcomes.
        num_processes: trials at a time; 1: in this process.
        progress: a line for each trial.
    """
    with tempfile.TemporaryDirectory() as scratch:
        kept = Kept(Path(scratch) if folder is None else folder, record)
        if num_processes == 1:
            work(planned, kept, progress)
        else:
            _work_side_by_side(planned, kept, num_processes)
        done = kept.outcomes()
        return kept.gather(done.values())


def work(planned: Planned, kept: Kept, progress: TextIO = sys.stderr) -> None:
    """Run trials on one thread, one at a time, until none lacks that nobody else is at work on."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        while lacking := _lacking(planned, kept):
            for trial in lacking:
                if _run_claimed(trial, kept, progress):
                    break
            else:  # others are at work on all of them; the next ones may follow from what they find
                with kept.claimed(lacking[0], wait=True):
                    pass
    finally:
        torch.set_num_threads(threads)


def _lacking(planned: Planned, kept: Kept) -> list[Trial]:
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():  # killed: nobody waits for this process
        return []
    done = kept.outcomes()
    return [trial for trial in planned.wanted(done) if trial not in done]


def _run_claimed(trial: Trial, kept: Kept, progress: TextIO) -> bool:
    with kept.claimed(trial) as ours:
        if not ours:
            return False
        outcome = run_trial(trial)
        kept.keep(outcome)
    judged = f"loss {outcome.judged_loss:.4f}" if outcome.curve else f"{outcome.accuracy:.4f}"
    progress.write(
        f"{trial.part} {trial.method}, {trial.workers} workers: rate {trial.learning_rate:g}, "
        f"momentum {trial.momentum:g}, seed {trial.seed}: {judged} in {outcome.cpu_s:.1f} s\n"
    )
    progress.flush()
    return True


def cores() -> int:
    """How many trials run at a time here: the cores that this process may use, at most 2."""
    return min(2, len(os.sched_getaffinity(0)))


def _work_side_by_side(planned: Planned, kept: Kept, num_processes: int) -> None:
    # Fresh processes: a fork would copy torch's thread pool in whatever state it is.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, context) as pool:
        futures = [pool.submit(work, planned, kept) for _ in range(num_processes)]
        for future in as_completed(futures):
            future.result()
