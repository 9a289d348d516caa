"""The session of a framework that exchanges gradients by itself: watches and measures it."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final, Self

import torch

from testbed.backends.protocol import ExternalFramework
from testbed.base.errors import DeadlineExceeded, RankLost, UsageError
from testbed.base.recorder import Recorder
from testbed.base.types import Traffic
from testbed.control.protocol import Control, Loss
from testbed.training.exchange.setup import AGREE_S
from testbed.training.exchange.step_state import now_on, passed_s
from testbed.training.protocol import StepReport

LOOK_EVERY_S: Final = 0.25


class StillWatch:
    """Tells once, from a thread of its own, that what began has not ended within its time.

    Args:
        late: called with the limit, in seconds.
    """

    def __init__(self, late: Callable[[float], None]) -> None:
        self._late = late
        self._limit_s, self._until_s = 0.0, math.inf
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="still-watch", daemon=True)
        self._thread.start()

    def begin(self, limit_s: float) -> None:
        """Something began."""
        self._limit_s, self._until_s = limit_s, time.monotonic() + limit_s

    def end(self) -> None:
        """It has ended."""
        self._until_s = math.inf

    def close(self) -> None:
        """End the thread."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            if time.monotonic() > self._until_s:
                self._late(self._limit_s)
                return


class ExternalSession:
    """See `TrainingSession`: another framework makes the training data-parallel.

    The framework's own wait for messages lies at the end of `loss.backward()`: exposed time is
    what passes between the moment when the last gradient is ready and the optimizer's step. On a
    GPU both moments are the device's, as the host runs ahead of it.

    An exchange that stands still for `patience_s` (or twice this rank's slowest step, if that is
    longer) makes the framework raise in the middle of a step; leaving the session raises what that
    means instead. Where it cannot raise, because a GPU waits for the exchange, this rank reports
    that it failed, and is lost.

    Args:
        model: trained; the framework makes all ranks start with rank 0's parameters.
        optimizer: of its parameters.
        framework: opened.
        control: told what this rank does, asked for what the others do.
        patience_s: how long an exchange may stand still when all ranks have been fast so far.
        on_resume: called whenever training goes on after it stood waiting for a message.
        recorder: told of waits.

    Attributes:
        model: what is to be called instead of the model.
        step: number of the step that is being computed.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        framework: ExternalFramework,
        control: Control,
        patience_s: float,
        on_resume: Callable[[], None] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.step = 0
        self._recorder = recorder
        self._framework = framework
        self._control = control
        self._on_resume = on_resume
        self._patience_s = patience_s
        self._timeout_s = max(AGREE_S, patience_s)  # first steps compile, allocate and connect
        self._lost = threading.Event()
        self._exposed_s = 0.0
        self._exposed_there: list[tuple[Any, Any]] = []  # moments of the device, begin and end
        self._last_ready_s: float | None = None
        self._last_ready: Any = None
        self._device = next(model.parameters()).device
        self._watch = None if framework.raises_late else StillWatch(self._give_up)
        control.on_loss(self._on_loss)
        try:
            self.model = framework.wrap(model, self._timeout_s)
        except RuntimeError as error:
            self._explain(error)
            raise
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
        self._missing = set(self._names)
        self._step_began_s: float | None = None
        self._handles: list[Any] = [
            parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            for parameter in trained
        ]
        self._handles.append(optimizer.register_step_pre_hook(self._before_step))
        if self._watch is not None:  # a forward pass waits for buffers of rank 0
            self._handles.append(self.model.register_forward_pre_hook(self._before_forward))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        for handle in self._handles:
            handle.remove()
        if self._watch is not None:
            self._watch.close()
        if isinstance(error, RuntimeError):
            self._explain(error)

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Backward passes inside only add to the gradients."""
        with self._framework.hold_back():
            yield
        self._missing = set(self._names)

    def synchronize(self) -> None:
        """The gradients are means already; what passed since the last one was ready was waiting."""
        ready_s, self._last_ready_s = self._last_ready_s, None
        if ready_s is None:
            return
        now_s, now = time.perf_counter(), now_on(self._device)
        if now is None:
            self._exposed_s += now_s - ready_s
        elif self._last_ready is not None:
            self._exposed_there.append((self._last_ready, now))
        self._last_ready = None
        if self._recorder is not None:
            self._recorder.add("wait", "exchange", ready_s, now_s)
            self._recorder.resumed_s = now_s
        self._learn_from_step(ready_s, now_s)
        self._check_all_came()
        self._missing = set(self._names)
        self._framework.count_step()
        self.step += 1
        self._control.state = f"computing step {self.step}"
        if self._on_resume is not None:
            self._on_resume()

    def end_step(self, *, flush: bool) -> StepReport:
        """See `TrainingSession.end_step`; no update is ever pending."""
        exposed_s, self._exposed_s = self._exposed_s, 0.0
        there, self._exposed_there = self._exposed_there, []
        exposed_s += passed_s(there)
        if self._watch is not None:
            self._watch.end()
        return StepReport(exposed_s)

    def held_tensors(self) -> list[torch.Tensor]:
        """See `TrainingSession.held_tensors`: a framework keeps its buckets to itself."""
        return []

    def watch_threads(self, around: Callable[[], AbstractContextManager[object]]) -> None:
        """See `TrainingSession.watch_threads`: there are none of ours."""

    def traffic(self) -> Traffic:
        """See `TrainingSession.traffic`."""
        return self._framework.traffic()

    def state_dict(self) -> dict[str, Any]:
        """See `TrainingSession.state_dict`; the framework does not tell its order of gradients."""
        return {"step": self.step, "order": []}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `TrainingSession.load_state_dict`."""
        self.step = state["step"]

    def _explain(self, error: RuntimeError) -> None:
        """Raise what an error of the framework's exchange means: who is lost, or late."""
        if not self._framework.broke(error):
            return
        # A rank that ends breaks its connections just before the control plane hears of it.
        late = "Timed out" in str(error)
        self._lost.wait(0.0 if late else self._patience_s / 2)
        loss, what = self._control.loss, f"the exchange of gradients in step {self.step}"
        if loss is not None:
            raise RankLost(loss.who, loss.why, f"this rank was in {what}") from error
        how = f"stood still for {self._timeout_s:g} s" if late else f"broke ({error})"
        raise DeadlineExceeded(
            f"{what} {how}; no rank is known to be lost; raise --deadline if steps are that slow; "
            f"{self._control.describe()}"
        ) from error

    def _give_up(self, limit_s: float) -> None:
        """The device waits for an exchange that does not come, and the host for the device."""
        words = (
            f"its exchange of gradients in step {self.step} stood still for {limit_s:g} s; no rank "
            f"is known to be lost; raise --deadline if steps are that slow; "
            f"{self._control.describe()}"
        )
        self._control.report_failure(words)
        self._control.give_up(Loss(self._control.rank, f"rank {self._control.rank}", words))

    def _on_loss(self, loss: Loss) -> None:
        self._lost.set()

    def _check_all_came(self) -> None:
        """Frameworks notice an unused parameter in the next forward pass, after a wrong update."""
        if not self._missing:
            return
        names = [name for key, name in self._names.items() if key in self._missing]
        if self.step == 0 and self._framework.fixed_graph:
            self._names = {k: n for k, n in self._names.items() if k not in self._missing}
            return
        raise UsageError(
            f"{', '.join(names)} got no gradient in step {self.step}, and this framework averages "
            "a step's gradients only when all have come; expected the same parameters in every "
            "step; use a backend that carries out plans, where parameters may be unused"
        )

    def _learn_from_step(self, ready_s: float, now_s: float) -> None:
        """A rank that computes for long is no rank that hangs: what was slow may be slow again."""
        began_s, self._step_began_s = self._step_began_s, now_s
        wanted_s = self._patience_s if began_s is None else 2 * (ready_s - began_s)
        if began_s is None or wanted_s > self._timeout_s:
            self._timeout_s = wanted_s
            self._framework.set_timeout(wanted_s)

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        self._last_ready_s = time.perf_counter()
        self._missing.discard(id(parameter))
        if not self._missing:
            self._last_ready = now_on(self._device)
            self._control.state = f"waiting for the exchange of gradients in step {self.step}"
            if self._watch is not None:
                self._watch.begin(self._timeout_s)

    def _before_forward(self, model: torch.nn.Module, inputs: Any) -> None:
        if self._watch is not None and model.training and torch.is_grad_enabled():
            self._watch.begin(self._timeout_s)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.synchronize()
