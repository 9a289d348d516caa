"""What the trainer is given and talks to: a run, a session that trains, observers of its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from testbed.backends.protocol import Backend
from testbed.base.config import RunConfig
from testbed.base.plan import Plan
from testbed.base.recorder import Recorder
from testbed.base.types import BSP, Traffic
from testbed.control.protocol import Control
from testbed.training.exchange.setup import Replan
from testbed.training.summary import Outcome
from testbed.workloads.workload import Workload


class Pricing(Protocol):
    """What exchanging costs if gradients are ready later than in a plain step."""

    def schedule_for(self, late_s: Mapping[str, float]) -> Plan:
        """The scheduler's plan, from by how much the gradient of each parameter is late."""
        ...

    def iteration_s(self, plan: Plan, late_s: Mapping[str, float]) -> float:
        """Seconds of an iteration with a plan."""
        ...


@dataclass(frozen=True)
class Run:
    """What a rank needs to train.

    Attributes:
        config: of the run.
        backend: opened with the plan's order and channels.
        control: the job's control plane.
        build: makes another workload like the one that is trained, for the reference.
        plan: see `Session`, as is `replan`.
        dilation: how many times slower than on the emulated cluster everything happens here.
        pricing: plans and predicts for other times of gradients; None = there are no times.
        root: process below which all processes of the job on this machine are; None = this one.
        observers: see the steps beside those that the trainer itself has.
        recorder: takes what the rank does in its measured steps; None = nothing is recorded.
    """

    config: RunConfig
    backend: Backend
    control: Control
    build: Callable[[], Workload]
    plan: Plan | None = None
    replan: Replan | None = None
    dilation: float = 1.0
    pricing: Pricing | None = None
    root: int | None = None
    observers: tuple[Observer, ...] = ()
    recorder: Recorder | None = None

    @property
    def rank(self) -> int:
        """This worker."""
        return self.backend.rank

    @property
    def in_step(self) -> bool:
        """Whether all ranks take each step together, so that one that pauses delays the others."""
        return self.backend.size > 1 and self.backend.capabilities.consistency == BSP


@dataclass(frozen=True)
class StepReport:
    """What a session says of the step that has just ended.

    Attributes:
        exposed_s: seconds that this rank stood waiting for messages.
        is_steady: False where the step waited for updates that it would have left to the next one.
        excluded_s: seconds of it that do not belong to training (see `ErrorProbe`).
        staleness: servers without a barrier: how many clocks the slowest worker was behind, last
            seen; None = not known.
    """

    exposed_s: float
    is_steady: bool = True
    excluded_s: float = 0.0
    staleness: int | None = None


class TrainingSession(AbstractContextManager["TrainingSession", None], Protocol):
    """One rank's part in the training of a model, whoever exchanges the gradients.

    When its context is left by an error, nobody is waited for.

    Attributes:
        model: to be called instead of the model that was given.
    """

    model: torch.nn.Module

    def accumulating(self) -> AbstractContextManager[None]:
        """Backward passes inside only add to the gradients."""
        ...

    def synchronize(self) -> None:
        """Wait until every gradient is the mean over the workers."""
        ...

    def end_step(self, *, flush: bool) -> StepReport:
        """After `optimizer.step()`: what the step waited for.

        Args:
            flush: parameters will be read, so that no update may be pending.
        """
        ...

    def held_tensors(self) -> list[torch.Tensor]:
        """What is kept for exchanging between steps, as far as it is known."""
        ...

    def watch_threads(self, around: Callable[[], AbstractContextManager[object]]) -> None:
        """From now on what other threads compute for the exchange runs within such a context."""
        ...

    def traffic(self) -> Traffic:
        """What this rank has sent and received for training."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What the next step depends on, beside model and optimizer; differs from rank to rank."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` gave."""
        ...


@dataclass(frozen=True)
class StepRecord:
    """A step as observers see it.

    Attributes:
        done: steps since the run's first one, this one included.
        loss: mean over this rank's samples.
        step_s: wall time of the step.
        time_s: training time, this step included; what observers take does not count.
        is_steady: False if this step or the one before it ended updates that it would have left to
            the next one, or if training paused between them (evaluation, checkpoint, comparison).
        report: of the session.
        began_s: when it began, of `time.perf_counter`; `ended_s` likewise.
    """

    done: int
    loss: float
    step_s: float
    time_s: float
    is_steady: bool
    report: StepReport
    began_s: float
    ended_s: float


class Observer:
    """Sees each step of a run, outside of measured time; does nothing unless it is overridden."""

    def begin(self, first: int, total: int) -> None:
        """`first` of `total` steps were done before, by the run that this one resumes."""

    def reads_after(self, done: int) -> bool:
        """Whether `after_step` will read parameters; in step with each other, all ranks agree."""
        return False

    def after_step(self, record: StepRecord) -> None:
        """A step has ended."""

    def finish(self, outcome: Outcome) -> None:
        """The last step has ended: add to what this rank brings home."""
