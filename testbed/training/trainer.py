"""The one trainer: the same loop over every backend, measured the same way."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from testbed.backends.protocol import Backend, ExternalFramework
from testbed.base.config import RunConfig
from testbed.base.errors import UsageError
from testbed.base.plan import Plan
from testbed.base.types import Op, Traffic
from testbed.control.protocol import Control
from testbed.noise.steal_time import StealTime, read_cores, shares_of
from testbed.records.cell import Accuracy
from testbed.training import checkpoint
from testbed.training.compressed.spec import Compression, compression_of, refuse_ratios
from testbed.training.evaluation import Snapshots, accuracy_at, accuracy_of
from testbed.training.exchange.setup import AGREE_S, Replan, agree_on
from testbed.training.external_session import ExternalSession
from testbed.training.reference import largest_error, reference_parameters, worker_seed
from testbed.training.replica import (
    Replica,
    backward,
    make_replica,
    num_steps,
    sample_order,
    update,
)
from testbed.training.resources import peak_bytes, reset_peak
from testbed.training.sampling import RunningDigest, SampleCursor, SampleOrder, digest_tensors
from testbed.training.session import Session
from testbed.training.slowdown import parse_slowdowns
from testbed.training.summary import Outcome
from testbed.workloads.workload import Workload

# Steps (of the warm-up) in which delivered means are compared with the true ones: each costs an
# exchange of all gradients.
COMPARED_STEPS = 3


@dataclass(frozen=True)
class Run:
    """What a rank needs to train: configuration, its place in the job, and its opened backend.

    `dilation` tells how many times slower than on the emulated cluster everything happens here.
    """

    config: RunConfig
    backend: Backend
    control: Control
    build: Callable[[], Workload]
    plan: Plan | None = None
    replan: Replan | None = None
    dilation: float = 1.0

    @property
    def rank(self) -> int:
        """This worker."""
        return self.backend.rank


def train(run: Run, workload: Workload) -> Outcome:
    """Train one rank's share of the run and prove what it did.

    Args:
        run: the rank's place in the job.
        workload: freshly built; `run.build` makes another one like it for the reference.

    Raises:
        UsageError: the configuration does not fit workload or backend.
        RankLost, DeadlineExceeded, NonFiniteGradient, Disagreement: see `Session`.
    """
    order = sample_order(run.config, workload, run.backend.size)
    total = num_steps(run.config, order)
    _check(run, total)
    replica = make_replica(workload, run.config, total)
    replica.model.train()
    session = _open_session(run, replica, _compression(run, workload, total))
    torch.manual_seed(worker_seed(run.config.seed, run.rank))
    try:
        outcome = _Loop(run, replica, session, order, total).run()
        session.close()
    except RuntimeError as error:
        if isinstance(session, ExternalSession):
            raise session.why(error) from error
        raise
    finally:
        session.end_threads()
    _evaluate(run, replica, outcome)
    return outcome


def num_warmup(config: RunConfig, total: int) -> int:
    """First steps that are not measured."""
    return min(5, total // 4) if config.warmup is None else config.warmup


def _compression(run: Run, workload: Workload, total: int) -> Compression | None:
    """What compresses the run; a replayed workload's gradients are made up, and so is their error.

    Raises:
        UsageError: the backend exchanges gradients by itself.
    """
    config = run.config
    compared = min(COMPARED_STEPS, config.verify_steps, num_warmup(config, total))
    if workload.recorded is not None:
        compared = 0
    compression = compression_of(config.compressor, config.seed, compared)
    if compression is None and run.plan is not None:
        refuse_ratios(run.plan)
    if compression is not None and isinstance(run.backend, ExternalFramework):
        raise UsageError(
            f"--compressor {config.compressor} compresses what a plan sends, and backend "
            f"{config.backend!r} exchanges gradients by itself; use another backend"
        )
    return compression


def _open_session(
    run: Run, replica: Replica, compression: Compression | None
) -> Session | ExternalSession:
    on_resume = replica.workload.on_resume
    if isinstance(run.backend, ExternalFramework) and run.backend.size > 1:
        peer = ExternalSession(
            *(replica.model, replica.optimizer, run.backend, run.control),
            0.8 * run.config.deadline,
            on_resume,
        )
        replica.called = peer.model
        return peer
    return Session(
        replica.model,
        replica.optimizer,
        run.backend,
        run.control,
        plan=run.plan,
        replan=run.replan,
        patience_s=0.8 * run.config.deadline,
        check_finite=replica.scaler is None,
        on_resume=on_resume,
        compression=compression,
    )


def _check(run: Run, total: int) -> None:
    config = run.config
    applies = Op.APPLY in run.backend.capabilities.ops
    if applies and config.clip_norm is not None:
        raise UsageError(
            "--clip-norm needs the whole mean gradient in one place, but with update=server it "
            "exists on the servers in slices; use update=worker"
        )
    if applies and (config.checkpoint or config.resume_from):
        raise UsageError(
            "--checkpoint and --resume-from need the optimizer's state, but with update=server it "
            "is on the servers; use update=worker"
        )
    if config.warmup is not None and config.warmup >= total:
        raise UsageError(
            f"--warmup is {config.warmup} and the run has {total} steps; expected fewer, so that "
            "something is left to measure"
        )


class _Loop:
    """The training loop of one rank, with what it measures."""

    def __init__(
        self,
        run: Run,
        replica: Replica,
        session: Session | ExternalSession,
        order: SampleOrder,
        total: int,
    ) -> None:
        self._run = run
        self._replica = replica
        self._session = session
        self._compressing = session.compressing
        self._total = total
        self._warmup = num_warmup(run.config, total)
        self._cursor = SampleCursor(order, run.rank)
        self._digest = RunningDigest()
        text = run.config.slow
        self._slow = () if text is None else parse_slowdowns(text, run.backend.size)
        evaluated = replica.workload.test is not None and run.rank == 0
        every = run.config.evaluate_every or order.steps_per_epoch
        self._snapshots = Snapshots(replica.model, every if evaluated else None)
        self._verified: list[torch.Tensor] = []
        self._outcome = Outcome(
            rank=run.rank,
            num_helper_processes=run.backend.capabilities.num_helper_processes,
            batch_size=order.batch_size,
            initial_digest=digest_tensors(replica.model.parameters()),
        )

    def run(self) -> Outcome:
        """Take all steps; returns the measurements."""
        outcome, backend, session = self._outcome, self._run.backend, self._session
        first = self._resume()
        before = backend.traffic()
        reset_peak(self._replica.device)
        cores, stolen = read_cores(), StealTime()
        time_s = 0.0
        awaited = False
        for step in range(first, self._total):
            if step - first == self._warmup:
                cores = read_cores()
            began_s = time.perf_counter()
            outcome.loss.append(self._step(step))
            if self._looks_at_parameters(step + 1):
                session.flush()  # what is still pending belongs to this step's time
            before_it, awaited = awaited, session.take_awaited()
            elapsed_s = time.perf_counter() - began_s - self._compared_s()
            exposed_s = session.take_exposed_s()
            time_s += elapsed_s
            taken = stolen.share()
            if step - first >= self._warmup:
                outcome.stolen.append(taken)
                outcome.unsteady.append(awaited or before_it)
                outcome.step_time_s.append(elapsed_s)
                outcome.exposed_s.append(exposed_s)
            if session.staleness is not None:
                outcome.staleness.append(session.staleness)
            self._after(step + 1, time_s)
            if step == first or self._looks_at_parameters(step + 1):
                self._resume_clock()  # what is not measured must not be made up for either
        outcome.cores_busy, outcome.cores_stolen = shares_of(cores, read_cores())
        moved = backend.traffic() - before
        if self._compressing is not None:
            moved -= self._compressing.comparison.traffic
        return self._finish(moved, self._total - first, time_s)

    def _compared_s(self) -> float:
        """Seconds that comparing means took in this step; the highest memory use forgets it too."""
        comparison = None if self._compressing is None else self._compressing.comparison
        if comparison is None or not comparison.spent_s:
            return 0.0
        spent_s, comparison.spent_s = comparison.spent_s, 0.0
        reset_peak(self._replica.device)
        return spent_s

    def _step(self, step: int) -> float:
        run, session = self._run, self._session
        indices = self._cursor.indices(step)
        self._digest.add(np.ascontiguousarray(indices).tobytes())
        hold_up_s = sum(slowdown.delay(run.rank, step) for slowdown in self._slow)
        if hold_up_s:
            time.sleep(hold_up_s * run.dilation)
            self._resume_clock()
        loss = backward(self._replica, indices, run.config.accumulate, session.accumulating)
        if run.config.clip_norm is not None or self._replica.scaler is not None:
            session.synchronize()
        update(self._replica, run.config.clip_norm)
        if self._replica.device.type == "cuda":
            # Not the whole device: a message that hides behind the next forward goes on.
            torch.cuda.current_stream(self._replica.device).record_event().synchronize()
        return loss

    def _resume_clock(self) -> None:
        """Tell a workload with a clock of its own that its device stood idle until now."""
        if self._replica.workload.on_resume is not None:
            self._replica.workload.on_resume()

    def _after(self, done: int, time_s: float) -> None:
        config = self._run.config
        if self._snapshots.due(done):
            self._snapshots.take(done, time_s)
        if self._verifies(done):
            self._verified = [p.detach().cpu().clone() for p in self._replica.model.parameters()]
        if config.checkpoint and self._saves(done):
            self._save(Path(config.checkpoint), done)

    def _looks_at_parameters(self, done: int) -> bool:
        """Whether anything reads the parameters after this step, so that none may be pending."""
        last = done == self._total
        return last or self._snapshots.due(done) or self._verifies(done) or self._saves(done)

    def _verifies(self, done: int) -> bool:
        return self._run.rank == 0 and done == min(self._run.config.verify_steps, self._total)

    def _saves(self, done: int) -> bool:
        config = self._run.config
        wanted = done == self._total or bool(config.every and done % config.every == 0)
        return config.checkpoint is not None and wanted

    def _save(self, folder: Path, done: int) -> None:
        state = checkpoint.capture(
            self._replica,
            step=done,
            sample_digest=self._digest.value,
            order=self._session.release_order,
            run=self._identity(),
            compression=None if self._compressing is None else self._compressing.saved(),
        )
        place = checkpoint.save(folder, self._run.rank, state)
        size = self._run.backend.size
        self._run.control.all_gather("checkpoint", b"", AGREE_S, members=size)
        if self._run.rank == 0:
            checkpoint.complete(place, size)

    def _resume(self) -> int:
        source = self._run.config.resume_from
        if source is None:
            return 0
        state = checkpoint.load(Path(source), self._run.rank, self._run.backend.size)
        if state["run"] != self._identity():
            raise UsageError(
                f"checkpoint {source} belongs to another run: it was made with {state['run']}, and "
                f"this is {self._identity()}; resume with the same settings"
            )
        size = self._run.backend.size
        agree_on("checkpoints", [f"step {state['step']}"], self._run.control, size)
        checkpoint.restore(self._replica, state)
        step = int(state["step"])
        if step >= self._total:
            raise UsageError(
                f"checkpoint {source} is at step {step} and the run ends at {self._total}; "
                "raise --steps or --epochs"
            )
        self._warmup = num_warmup(self._run.config, self._total - step)
        if self._warmup >= self._total - step:
            raise UsageError(
                f"--warmup is {self._warmup} and {self._total - step} steps are left after "
                f"checkpoint {source}; expected fewer, so that something is left to measure"
            )
        self._session.resume(step, state["order"])
        if self._compressing is not None:
            self._compressing.restore(state["compression"], self._replica.device)
        self._digest = RunningDigest(state["sample_digest"])
        return step

    def _identity(self) -> str:
        """What a resumed run must have in common with the one that was saved."""
        config = self._run.config
        return (
            f"workload={config.workload} seed={config.seed} batch={self._outcome.batch_size} "
            f"optimizer={config.optimizer} schedule={config.schedule} precision={config.precision} "
            f"initial={self._outcome.initial_digest[:12]}"
            + (f" compressor={config.compressor}" if self._compressing is not None else "")
        )

    def _finish(self, moved: Traffic, steps: int, time_s: float) -> Outcome:
        outcome, replica = self._outcome, self._replica
        outcome.sent_bytes, outcome.received_bytes = moved.sent_bytes, moved.received_bytes
        outcome.steps, outcome.training_time_s = steps, time_s
        outcome.sample_digest = self._digest.value
        outcome.final_digest = digest_tensors(replica.model.parameters())
        outcome.peak_memory_bytes = peak_bytes(replica.device)
        if self._compressing is not None:
            outcome.compression = self._compressing.result(self._total - steps + self._warmup)
        if self._run.rank == 0 and self._run.config.resume_from is None:
            self._run.control.state = "training alone, to compare"
            self._compare_with_reference()
        self._run.control.state = "evaluating"
        for snapshot in self._snapshots.taken:
            accuracy = accuracy_at(replica, snapshot)
            if accuracy is not None:
                outcome.accuracy_curve.append(
                    Accuracy(step=snapshot.step, time_s=snapshot.time_s, accuracy=accuracy)
                )
        return outcome

    def _compare_with_reference(self) -> None:
        run = self._run
        if self._compressing is not None:
            return  # what is lost on the way makes another training, on purpose
        if not self._verified or run.backend.capabilities.consistency != "bsp":
            return
        steps = min(run.config.verify_steps, self._total)
        random_state = torch.get_rng_state()
        theirs = reference_parameters(run.build(), run.config, run.backend.size, steps)
        torch.set_rng_state(random_state)
        self._outcome.reference_steps = steps
        self._outcome.reference_error = largest_error(self._verified, theirs)
        pairs = zip(self._verified, theirs, strict=True)
        self._outcome.bit_equal = all(torch.equal(a, b) for a, b in pairs)


def _evaluate(run: Run, replica: Replica, outcome: Outcome) -> None:
    if run.rank == 0:
        outcome.test_accuracy = accuracy_of(replica)
