"""The one trainer: the same loop over every backend, measured the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch

from testbed.backends.protocol import ExternalFramework
from testbed.base.axes import AXES, COMPRESSORS, inexact_parts
from testbed.base.config import RunConfig
from testbed.base.errors import UsageError
from testbed.training.checkpoint import Checkpoints
from testbed.training.compressed.spec import (
    Compression,
    compression_of,
    refuse_ratios,
)
from testbed.training.evaluation import Evaluation
from testbed.training.evidence import ContentDigest
from testbed.training.exchange.setup import AGREE_S
from testbed.training.external_session import ExternalSession
from testbed.training.measurement import CompressionCosts, LayerEvents, Measurement, Recording
from testbed.training.memory import MemoryWatch, plan_memory, wants_memory
from testbed.training.protocol import Observer, Run, StepRecord, TrainingSession
from testbed.training.reference import MIRROR_SLACK, Compressing, Verification, worker_seed
from testbed.training.replica import (
    Replica,
    backward,
    make_replica,
    num_steps,
    sample_order,
    update,
)
from testbed.training.sampling import RunningDigest, SampleCursor, digest_tensors
from testbed.training.session import Session
from testbed.training.slowdown import parse_slowdowns
from testbed.training.summary import Outcome
from testbed.workloads.workload import Workload

# Steps (of the warm-up) in which delivered means are compared with the true ones: each costs an
# exchange of all gradients.
COMPARED_STEPS = 3

T = TypeVar("T")


def train(run: Run, workload: Workload) -> Outcome:
    """Train one rank's share of the run and prove what it did.

    Args:
        run: the rank's place in the job.
        workload: freshly built; `run.build` makes another one like it for the reference.

    Raises:
        UsageError: the configuration does not fit workload or backend.
        Disagreement: ranks have other parameters, or other plans.
        RankLost, DeadlineExceeded: of a rank that was lost or did not come.
        NonFiniteGradient: a mean holds NaN or infinity.
    """
    config = run.config
    order = sample_order(config, workload, run.backend.size)
    total = num_steps(config, order)
    _check(run, total)
    replica = make_replica(workload, config, total)
    replica.recorder = run.recorder
    replica.model.train()
    compression = _compression(run, workload, total)
    foreseen = plan_memory(run, replica, compression, order.batch_size // config.accumulate)
    run = replace(run, plan=foreseen.schedule or run.plan)
    layers = None if run.recorder is None else LayerEvents(run.recorder, replica.model)
    session, observers = _open_session(run, replica, compression)
    if layers is not None:
        layers.follow(replica.optimizer)
    with foreseen, session:
        replica.called = session.model
        torch.manual_seed(worker_seed(config.seed, run.rank))
        outcome = Outcome(
            rank=run.rank,
            num_helper_processes=run.backend.capabilities.num_helper_processes,
            batch_size=order.batch_size,
            initial_digest=digest_tensors(replica.model.parameters()),
        )
        digest, content = RunningDigest(), ContentDigest()
        identity = _identity(config, outcome)
        checkpoints = Checkpoints(run, replica, session, digest, identity, total)
        first = checkpoints.resume()
        if config.verify_steps and config.resume_from is None:
            observers += _verification(run, replica, session, compression, total, content)
        if workload.test is not None:
            every = config.evaluate_every or order.steps_per_epoch
            observers.append(Evaluation(run, replica, every))
        warmup = _warmup_left(config, total, first)
        measurement = _while_still(
            run, lambda: Measurement(session, replica.device, warmup, run.root)
        )
        observers = [measurement, *observers, checkpoints, *run.observers]
        if run.recorder is not None:
            observers.append(Recording(run.recorder, first, warmup, run.root))
        watched = first + warmup if warmup and foreseen.engine is not None else None
        watch = MemoryWatch(replica, session, watched)
        cursor = SampleCursor(order, run.rank)
        steps = _Steps(run, replica, session, cursor, (digest, content), watch)
        steps.take(first, total, observers)
        _while_still(run, lambda: measurement.finish(outcome))
        for observer in observers[1:]:
            observer.finish(outcome)
        if run.recorder is not None and isinstance(session, Session):
            run.recorder.plan = session.plan
        outcome.memory = foreseen.result(watch)
        outcome.sample_digest = digest.value
        # A resumed run has not seen what came before.
        outcome.content_digest = "" if first else content.value
        outcome.final_digest = digest_tensors(replica.model.parameters())
        outcome.buffer_digest = digest_tensors(replica.model.buffers())
    return outcome


def _while_still(run: Run, count: Callable[[], T]) -> T:
    """Count bytes while no rank has any under way, where ranks are in step with each other."""
    if not run.in_step:
        return count()
    run.control.all_gather("still", b"", AGREE_S, members=run.backend.size)
    counted = count()
    run.control.all_gather("counted", b"", AGREE_S, members=run.backend.size)
    return counted


def num_warmup(config: RunConfig, total: int) -> int:
    """First steps that are not measured: five, or half of so few that five would leave less."""
    return min(5, total // 2) if config.warmup is None else config.warmup


class _Steps:
    """Takes the steps of one rank, and tells observers of each.

    Args:
        run: the rank's place in the job.
        replica: that is trained.
        session: exchanges gradients.
        cursor: this rank's samples.
        digests: of all samples so far, and of what they held.
        watch: measures the memory of one step.
    """

    def __init__(
        self,
        run: Run,
        replica: Replica,
        session: TrainingSession,
        cursor: SampleCursor,
        digests: tuple[RunningDigest, ContentDigest],
        watch: MemoryWatch,
    ) -> None:
        self._run = run
        self._replica = replica
        self._session = session
        self._cursor = cursor
        self._digest, self._content = digests
        self._watch = watch
        text = run.config.slow
        self._slow = () if text is None else parse_slowdowns(text, run.backend.size)

    def take(self, first: int, total: int, observers: Sequence[Observer]) -> None:
        """Take the steps from number `first` on."""
        for observer in observers:
            observer.begin(first, total)
        time_s, was_steady = 0.0, True
        for done in range(first + 1, total + 1):
            pauses = done == total or any(o.reads_after(done) for o in observers)
            began_s = time.perf_counter()
            with self._watch.around(done):
                loss = self._step(done - 1)
            report = self._session.end_step(flush=pauses)
            ended_s = time.perf_counter()
            step_s = ended_s - began_s - report.excluded_s
            time_s += step_s
            is_steady = was_steady and report.is_steady
            record = StepRecord(done, loss, step_s, time_s, is_steady, report, began_s, ended_s)
            for observer in observers:
                observer.after_step(record)
            was_steady = report.is_steady and not pauses
            if pauses and self._run.in_step:
                # What one rank does longer than others is not to be seen as their waiting.
                self._run.control.all_gather("go on", b"", AGREE_S, members=self._run.backend.size)
            if pauses or done == first + 1:
                self._resume_clock()

    def _step(self, step: int) -> float:
        run, session = self._run, self._session
        indices = self._cursor.indices(step)
        self._digest.add(np.ascontiguousarray(indices).tobytes())
        delay_s = sum(slowdown.delay(run.rank, step) for slowdown in self._slow)
        if delay_s:
            time.sleep(delay_s * run.dilation)
            self._resume_clock()
        parts = run.config.accumulate
        loss = backward(self._replica, indices, parts, session.accumulating, self._content.see)
        if run.config.clip_norm is not None or self._replica.scaler is not None:
            session.synchronize()
        update(self._replica, run.config.clip_norm)
        if self._replica.device.type == "cuda":
            # Not the whole device: a message that hides behind the next forward pass goes on.
            torch.cuda.current_stream(self._replica.device).record_event().synchronize()
        return loss

    def _resume_clock(self) -> None:
        """Tell a workload with a clock of its own that its device stood idle until now."""
        if self._replica.workload.on_resume is not None:
            self._replica.workload.on_resume()


def _compression(run: Run, workload: Workload, total: int) -> Compression | None:
    """What compresses the run, and in how many of its first steps means are compared.

    A replayed workload's gradients are made up, so is their error; a run that goes on has no first
    steps.
    """
    config = run.config
    warmup = num_warmup(config, total) - wants_memory(config)  # the last one is measured
    compared = max(0, min(COMPARED_STEPS, config.verify_steps, warmup))
    if workload.recorded is not None or config.resume_from is not None:
        compared = 0
    compression = compression_of(config.compressor, config.seed, compared)
    if compression is None and run.plan is not None:
        refuse_ratios(run.plan)
    return compression


def _open_session(
    run: Run, replica: Replica, compression: Compression | None
) -> tuple[TrainingSession, list[Observer]]:
    """The session, and an observer of its compressor."""
    on_resume = replica.workload.on_resume
    patience_s = 0.8 * run.config.deadline
    if isinstance(run.backend, ExternalFramework) and run.backend.size > 1:
        external = ExternalSession(
            *(replica.model, replica.optimizer, run.backend, run.control),
            *(patience_s, on_resume, run.recorder),
        )
        return external, []
    session = Session(
        *(replica.model, replica.optimizer, run.backend, run.control),
        plan=run.plan,
        replan=run.replan,
        patience_s=patience_s,
        check_finite=replica.scaler is None,
        on_resume=on_resume,
        compression=compression,
        strategy=replica.strategy,
        recorder=run.recorder,
    )
    return session, [] if session.engine is None else [CompressionCosts(session.engine)]


def _verification(
    run: Run,
    replica: Replica,
    session: TrainingSession,
    compression: Compression | None,
    total: int,
    content: ContentDigest,
) -> list[Observer]:
    """Compares with one process; nothing where something else than a compressor is not exact."""
    compressing = None
    if compression is not None and isinstance(session, Session):
        slack = 0.0 if replica.strategy.mirror is None else MIRROR_SLACK
        compressing = Compressing(compression, lambda: session.plan, slack)
    known = set() if compressing is None else {COMPRESSORS.what}
    if inexact_parts(run.config).keys() - known:
        return []
    num_steps = min(run.config.verify_steps, total)
    return [Verification(run, replica.model, num_steps, content, compressing)]


def _check(run: Run, total: int) -> None:
    config = run.config
    if config.warmup is not None and config.warmup >= total:
        raise UsageError(
            f"--warmup is {config.warmup} and the run has {total} steps; expected fewer, so that "
            "something is left to measure"
        )


def _warmup_left(config: RunConfig, total: int, first: int) -> int:
    """First steps of a run, from number `first` on, that are not measured."""
    warmup = num_warmup(config, total - first)
    if warmup >= total - first:
        raise UsageError(
            f"--warmup is {warmup} and {total - first} steps are left after checkpoint "
            f"{config.resume_from}; expected fewer, so that something is left to measure"
        )
    return warmup


def _identity(config: RunConfig, outcome: Outcome) -> str:
    """What a resumed run must have in common with the one that was saved."""
    bound = [axis for axis in AXES if not axis.resumes]
    later = [axis for axis in bound if not axis.shown and not axis.is_default(config)]
    return (
        f"workload={config.workload} seed={config.seed} batch={outcome.batch_size} "
        f"optimizer={config.optimizer} schedule={config.schedule} precision={config.precision} "
        f"initial={outcome.initial_digest[:12]}"
        + "".join(f" {axis.what}={axis.of(config)}" for axis in later)
    )
