"""The session: exchanges gradients as the plan says, and updates parameters with their means."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Self

import torch

from testbed.backends.protocol import Backend
from testbed.base.axes import SCHEDULERS
from testbed.base.plan import Plan, check_plan
from testbed.base.recorder import Recorder
from testbed.base.types import Event, Traffic
from testbed.control.protocol import Control
from testbed.memory.strategy import KEEP_ALL, Strategy
from testbed.training.compressed.engine import engine_of, resumption
from testbed.training.compressed.spec import Compression
from testbed.training.exchange.buckets import GradientBuckets
from testbed.training.exchange.hooks import ForwardHooks, before_state_access
from testbed.training.exchange.refusals import (
    closure_refused,
    read_unseen,
    refuse_release,
    released_early,
)
from testbed.training.exchange.release import ReleasedUpdate
from testbed.training.exchange.setup import AGREE_S, Replan, agree_on, replanner, share_start
from testbed.training.exchange.step_state import Phase, StepState
from testbed.training.exchange.unused import UnusedParameters
from testbed.training.exchange.update import DeferredUpdate, Delivery, check_optimizer, delivery_of
from testbed.training.optimizers import common_learning_rate, describe_optimizer
from testbed.training.protocol import StepReport
from testbed.training.sampling import describe_tensors


class Session:
    """One rank's part in data-parallel training of a model.

    Hooks itself to the model and the optimizer: `loss.backward()` submits messages as soon as the
    plan allows, `optimizer.step()` first waits until all gradients are means over the workers.
    Call `synchronize()` yourself only to see the means earlier (clipping, scaling).
    Under a plan that crosses the iteration `optimizer.step()` returns at once; each layer is then
    updated just before its next forward, all of a message at once. `flush()` ends what is pending,
    and happens by itself before a `state_dict()` of the model or the optimizer.

    With a strategy that releases gradients each parameter is updated as its mean arrives, in the
    backward pass where the plan lets it, and `optimizer.step()` updates the rest; see
    `memory.release` for what is different then.

    With a backend that runs the optimizer on servers (`Op.APPLY`), parameters come back instead.

    Args:
        model: built alike on all ranks; rank 0's parameters and buffers replace the others'.
        optimizer: any torch optimizer of the model's parameters.
        backend: opened with the plan's order and channels.
        control: the job's control plane.
        plan: None = one message per tensor as it gets ready (wait-free backpropagation).
        replan: makes the plan anew, once, from the order in which the first step's gradients came
            on rank 0 (if it crosses the iteration: from the reverse of its forward order); None =
            the given plan stays (without a plan: wait-free backpropagation).
        patience_s: how long to wait for a gradient when all ranks have been fast so far.
        check_finite: report NaN and infinity (off where a gradient scaler looks for them).
        on_resume: called when training goes on after it stood waiting for a message.
        compression: compresses every message; means then come from it. None = sums of all.
        strategy: what becomes of gradients and of what was not sent.
        recorder: told of exchanges and of waiting for them.

    Attributes:
        backend, model: as given.
        plan: that is carried out.
        engine: what compresses the messages, if anything does.
        step_state: of the step that is being computed.
        events: the newest step's exchanges that have all ended, in the order of waiting for them.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        backend: Backend,
        control: Control,
        *,
        plan: Plan | None = None,
        replan: Replan | None = None,
        patience_s: float = 10.0,
        check_finite: bool = True,
        on_resume: Callable[[], None] | None = None,
        compression: Compression | None = None,
        strategy: Strategy = KEEP_ALL,
        recorder: Recorder | None = None,
    ) -> None:
        self.backend = backend
        self.model = model
        self.events: list[Event] = []
        self._control, self._strategy = control, strategy
        self._optimizer = optimizer
        self._named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self._frozen = {id(p): n for n, p in model.named_parameters() if not p.requires_grad}
        device = self._named[0][1].device
        self.step_state = StepState(control, patience_s, on_resume, recorder, device)
        self._pending: DeferredUpdate | None = None
        self._released: ReleasedUpdate | None = None
        self._is_steady = True
        self._ready_names: list[str] = []
        self._leave: Callable[[], None] | None = None
        agree_on("parameters", describe_tensors(self._named), control, backend.size)
        self.engine = engine_of(
            *(compression, strategy.mirror, backend, control, self._named, optimizer),
            check_finite=check_finite,
            patience_s=patience_s,
        )
        self._delivery: Delivery = self.engine or delivery_of(
            *(backend, check_finite, partial(describe_optimizer, optimizer)),
            partial(common_learning_rate, optimizer),
        )
        if strategy.release is not None:
            refuse_release(backend, check_finite)
        if plan is None:
            replan = replan or replanner(SCHEDULERS.default, self._named)
            plan = replan([name for name, _ in reversed(self._named)])
        self._replan = replan if self._delivery.may_replan else None
        share_start(model, backend)
        self._adopt(plan)
        self._reducer = self._delivery.reducer(self.step_state)
        self._unused = UnusedParameters(
            *(backend, control, self.step_state, device, max(AGREE_S, patience_s)),
            zeros_tell=compression is None,
        )
        self._forward: ForwardHooks | None = None
        self._handles: list[Any] = []
        self._hook(model)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
        else:
            self._end_threads()

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Backward passes inside only add to the gradients; the first one outside sends them."""
        self.step_state.phase = Phase.ACCUMULATING
        try:
            yield
        finally:
            self.step_state.phase = Phase.EXCHANGING

    def synchronize(self) -> None:
        """Wait until every gradient is the mean over the workers.

        Raises:
            RankLost: a rank was lost; names it, the operation, the tensor and the step.
            DeadlineExceeded: a rank is alive but did not come; says what every rank is doing.
            NonFiniteGradient: a mean holds NaN or infinity.
            UsageError: a gradient was changed since its backward pass, or they are released.
        """
        if self._strategy.release is not None:
            raise released_early("session.synchronize() is for what looks at all mean gradients")
        if self.step_state.phase is Phase.SYNCHRONIZED:
            return
        self._end_pending()
        reducer, parameters = self._reducer, self._buckets.parameters
        if self._delivery.exchanges:
            self._finalize_backward()
            reducer.spread()
            reducer.land_all()
            values = {tensor: reducer.collect(tensor) for tensor in range(len(parameters))}
        else:
            values = {i: p.grad for i, p in enumerate(parameters) if p.grad is not None}
        unused = self._unused.now(reducer)
        gradients = self._delivery.deliver(values, reducer.number, unused)
        for tensor, gradient in gradients.items():
            parameters[tensor].grad = gradient
        self.events = self.step_state.take_events()
        self._go_on()

    def flush(self) -> None:
        """Update every parameter whose update is still pending."""
        if self._end_pending():
            self._is_steady = False

    def end_step(self, *, flush: bool = False) -> StepReport:
        """See `TrainingSession.end_step`."""
        if flush:
            self.flush()
        is_steady, self._is_steady = self._is_steady, True
        return StepReport(
            exposed_s=self.step_state.take_waited_s(),
            is_steady=is_steady,
            excluded_s=0.0 if self.engine is None else self.engine.take_excluded_s(),
            staleness=self.step_state.staleness,
        )

    def held_tensors(self) -> list[torch.Tensor]:
        """See `TrainingSession.held_tensors`."""
        engine, held = self.engine, self._buckets.held_tensors()
        return held if engine is None else held + engine.driver.kept_tensors()

    def watch_threads(self, around: Callable[[], AbstractContextManager[object]]) -> None:
        """See `TrainingSession.watch_threads`."""
        if self.engine is not None:
            self.engine.driver.watch(around)

    @property
    def step(self) -> int:
        """Number of the step that is being computed."""
        return self.step_state.number

    def traffic(self) -> Traffic:
        """See `TrainingSession.traffic`."""
        moved = self.backend.traffic()
        return moved if self.engine is None else moved - self.engine.excluded_traffic

    def state_dict(self) -> dict[str, Any]:
        """What the next step depends on, beside model and optimizer; differs from rank to rank.

        Returns:
            `step`: its number; `order`: what the plan was made from after the first step (names in
            the order in which gradients became ready; if the plan crosses the iteration, the
            reverse of the order in which the forward pass needed the parameters); `compression`:
            what the compressor keeps, in tensors that the next step overwrites.
        """
        self.flush()
        kept = None if self.engine is None else self.engine.state_dict()
        return {"step": self.step, "order": list(self._ready_names), "compression": kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a step, with the plan of the session that was saved."""
        self.flush()
        names, resume = state["order"], resumption(self.engine, state.get("compression"))
        self.step_state.number = state["step"]
        if self._replan is not None and names:
            self._adopt(self._replan(names))
            self._replan = None
        self._ready_names = list(names)
        resume()
        self._reducer = self._delivery.reducer(self.step_state)

    def on_close(self, leave: Callable[[], None]) -> None:
        """Call this once when the session is closed; for whoever opened the backend for it."""
        self._leave = leave

    def close(self) -> None:
        """Take the hooks off; ends the backend only if the session was given that to do."""
        if self._handles:
            self.flush()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._end_threads()
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()

    def _end_threads(self) -> None:
        if self.engine is not None:
            self.engine.close()

    def _adopt(self, plan: Plan) -> None:
        sizes = [parameter.numel() for _, parameter in self._named]
        check_plan(plan, [name for name, _ in self._named], sizes)
        agree_on("plans", [f"{plan.scheduler} {plan.digest()}"], self._control, self.backend.size)
        by_name = dict(self._named)
        self.plan = plan
        self._buckets = GradientBuckets(
            *(plan, [by_name[name] for name in plan.names], self._strategy.release),
            travels=self._delivery.exchanges and self._strategy.mirror is None,
        )
        self._index = {id(p): i for i, p in enumerate(self._buckets.parameters)}
        self._defers = plan.crosses_iteration and self._delivery.exchanges
        self._delivery.adopt(self._buckets)

    def _hook(self, model: torch.nn.Module) -> None:
        self._handles += [
            p.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            for p in self._buckets.parameters
            if self._delivery.exchanges or self._strategy.release is not None
        ]
        self._handles.append(self._optimizer.register_step_pre_hook(self._before_step))
        self._handles.append(self._optimizer.register_step_post_hook(self._after_step))
        if self._defers:
            self._forward = ForwardHooks(model, self._about_to_read)
            self._handles += self._forward.handles
            self._handles += before_state_access(model, self._optimizer, self.flush)

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        tensor = self._index[id(parameter)]
        if self._pending is not None and tensor in self._pending.unread:
            raise read_unseen(self.plan.names[tensor], self.plan.scheduler)
        if self.step_state.phase is Phase.ACCUMULATING:
            self._reducer.accumulate(tensor)
            return
        self.step_state.begin_exchange()
        if self._strategy.release is None or self._defers:
            self._reducer.mark_ready(tensor)
        else:
            self._begin_released().receive(tensor)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_updating:
            return
        if any(value is not None for value in (*args[1:], kwargs.get("closure"))):
            raise closure_refused()
        if self._delivery.exchanges:
            check_optimizer(optimizer, self._index, self._frozen)
        if self._defers and self.step_state.phase is not Phase.SYNCHRONIZED:
            if not self.step_state.is_first and self._reducer.may_defer:
                self._defer()
                return
            self._is_steady = False
        if self._strategy.release is None:
            self.synchronize()
        else:
            self._end_released()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_updating:
            self.step_state.phase = Phase.EXCHANGING

    @property
    def _is_updating(self) -> bool:
        return any(each and each.is_stepping for each in (self._pending, self._released))

    def _finalize_backward(self) -> None:
        self._reducer.finalize_backward()
        if self.step_state.is_first and not self._ready_names:
            self._ready_names = [self.plan.names[i] for i in self._reducer.ready_order]

    def _defer(self) -> None:
        """Let each layer take the step when it is about to be read."""
        self._end_pending()
        self._finalize_backward()
        reducer, buckets = self._reducer, self._buckets
        unused = self._unused.later(reducer, len(buckets.parameters))
        reducer.spread()
        self._pending = DeferredUpdate(reducer, self._delivery, buckets, self._optimizer, unused)
        for parameter in buckets.parameters:
            parameter.grad = None
        self._go_on()

    def _begin_released(self) -> ReleasedUpdate:
        """The step whose parameters are updated as their means arrive."""
        if self._released is None:
            self._released = ReleasedUpdate(
                *(self._reducer, self._delivery, self._buckets, self._optimizer, self._unused)
            )
        return self._released

    def _end_released(self) -> None:
        self._end_pending()
        released = self._begin_released()
        if self._delivery.exchanges:
            self._finalize_backward()
            self._reducer.spread()
        released.finish()
        self.events = self.step_state.take_events()
        self._released = None
        self._go_on()

    def _about_to_read(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        if (pending := self._pending) is not None and pending.unread:
            pending.read([self._index[id(p)] for p in parameters if id(p) in self._index])

    def _end_pending(self) -> bool:
        """Whether an update was pending."""
        if self._pending is None:
            return False
        self._pending.take(list(self._pending.left))
        self._unused.end()
        self.events = self.step_state.take_events()
        self._pending = None
        return True

    def _go_on(self) -> None:
        """Begin the next step."""
        if self.step_state.is_first and self._delivery.exchanges:
            self._learn_from_first_step()
        self.step_state.end()
        self._reducer = self._delivery.reducer(self.step_state)

    def _learn_from_first_step(self) -> None:
        """Adopt rank 0's order of gradients; learn whether parameters stay unused on any rank."""
        if self._forward is not None:
            needed = [self._index[id(p)] for p in self._forward.learn() if id(p) in self._index]
            if self._replan is not None:
                self._ready_names = [self.plan.names[tensor] for tensor in reversed(needed)]
        mine = "\n".join([str(len(self._reducer.absent)), *self._ready_names]).encode()
        answers = self._control.all_gather("order", mine, AGREE_S, members=self.backend.size)
        self._unused.ask_always = any(answer.split(b"\n")[0] != b"0" for answer in answers)
        names = answers[0].decode().split("\n")[1:]
        if self._replan is not None:
            self._adopt(self._replan(names))
        self._ready_names = names
