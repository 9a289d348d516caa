"""The driver: gradients leave as the plan says, and are means before parameters are updated."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from testbed.backends.protocol import Backend
from testbed.base.plan import Plan, check_plan
from testbed.base.types import Event, Op
from testbed.control.protocol import Control
from testbed.training.compressed.engine import Compressing
from testbed.training.compressed.spec import Compression
from testbed.training.exchange.buckets import GradientBuckets, describe_messages
from testbed.training.exchange.hooks import (
    ForwardHooks,
    before_state_access,
    refuse_closure,
    refuse_unexchanged,
)
from testbed.training.exchange.reducer import Contribution, GradientReducer
from testbed.training.exchange.refusals import halves_refused, read_unseen, unused_on_server
from testbed.training.exchange.setup import (
    AGREE_S,
    Replan,
    agree_on,
    install,
    replanner,
    share_start,
)
from testbed.training.exchange.unused import UnusedParameters
from testbed.training.exchange.update import (
    DeferredUpdate,
    all_zero,
    divide,
    norms_of,
    refuse_non_finite,
)
from testbed.training.optimizers import common_learning_rate, describe_optimizer
from testbed.training.sampling import describe_tensors
from testbed.training.waiting import Waiter


class Session:
    """One rank's part in data-parallel training of a model.

    Hooks itself to the model and the optimizer: `loss.backward()` sends messages as soon as the
    plan lets them go, `optimizer.step()` first waits until all gradients are means over the
    workers. Call `synchronize()` yourself only to see the means earlier (clipping, scaling).

    Under a plan that crosses the iteration `optimizer.step()` returns at once; each layer is then
    updated just before its next forward pass. `flush()` ends what is pending, and happens by itself
    before a `state_dict()`.

    With a backend that runs the optimizer on servers (`Op.APPLY`), parameters come back instead
    of gradients, and `optimizer.step()` finds nothing left to do. `events` holds the exchanges of
    the newest step whose exchanges have all ended, in the order in which they were waited for.

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
        on_resume: called whenever training goes on after it stood waiting for a message.
        compression: compresses every message; means then come from it. None = sums of all.
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
    ) -> None:
        self.backend = backend
        self.events: list[Event] = []
        self._control = control
        self._optimizer = optimizer
        self._waiter = Waiter(control, patience_s, on_resume)
        self._check_finite = check_finite
        self._named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self._frozen = {id(p): n for n, p in model.named_parameters() if not p.requires_grad}
        self._sending = True
        self._synchronized = False
        self._awaited = False
        self._leave: Callable[[], None] | None = None
        self._ready_names: list[str] = []
        self._reads: ForwardHooks | None = None
        self._pending: DeferredUpdate | None = None
        self._applies = Op.APPLY in backend.capabilities.ops
        drifts = backend.capabilities.consistency == "none"
        self._divisor = 1 if drifts or compression else backend.size
        # A sum over one worker is the gradient itself: nothing is sent and nothing is hooked.
        self._alone = backend.size == 1 and not self._applies and not compression
        agree_on("parameters", describe_tensors(self._named), control, backend.size)
        self.compressing = (
            None
            if compression is None
            else Compressing(
                *(compression, backend, control, self._named, optimizer),
                check_finite=check_finite,
                patience_s=patience_s,
            )
        )
        self._replan = None if self._applies else replan
        if plan is None:
            replan = replan or replanner("wfbp", self._named)
            self._replan = None if self._applies else replan
            plan = replan([name for name, _ in reversed(self._named)])
        share_start(model, backend)
        self._adopt(plan)
        self._usage = UnusedParameters(
            backend,
            control,
            self._waiter.wait,
            self._parameters[0].device,
            max(AGREE_S, patience_s),
            self.compressing.conversations.submit if self.compressing else None,
        )
        self._handles: list[Any] = []
        self._hook(model)

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Backward passes inside only add to the gradients; the first one outside sends them."""
        self._sending = False
        try:
            yield
        finally:
            self._sending = True

    def synchronize(self) -> None:
        """Wait until every gradient is the mean over the workers.

        Raises:
            RankLost: a rank was lost; names it, the operation, the tensor and the step.
            DeadlineExceeded: a rank is alive but did not come; says what every rank is doing.
            NonFiniteGradient: a mean holds NaN or infinity.
            UsageError: a gradient was changed since its backward pass.
        """
        if self._synchronized:
            return
        self._end_pending()
        if not self._alone:
            contribution = self._end_backward()
            if self.plan.halves:
                contribution.flight.spread()
            contribution.flight.land_all(self._waiter.wait)
            for tensor, parameter in enumerate(self._parameters):
                parameter.grad = contribution.flight.collect(tensor)
            if self.compressing is not None:
                self.compressing.compare(contribution.flight, self._keys, self.step)
        if self._applies:
            self._take_parameters()
        else:
            self._take_means()
        self.events = self._waiter.take_events()
        self._end_step()

    def flush(self) -> None:
        """Update every parameter whose update is still pending."""
        self._awaited |= self._end_pending()

    def take_awaited(self) -> bool:
        """Whether a step since the last call awaited what it would have left to the next one.

        First and compared steps do, and those before a `flush`; not a training that always waits.
        """
        awaited, self._awaited = self._awaited, False
        return awaited

    @property
    def step(self) -> int:
        """Number of the step that is being computed."""
        return self._waiter.step

    @property
    def staleness(self) -> int | None:
        """Servers without a barrier: how many clocks the slowest worker was behind, last seen."""
        return self._waiter.staleness

    def take_exposed_s(self) -> float:
        """Seconds that this rank stood waiting for messages since the last call."""
        return self._waiter.take_waited_s()

    @property
    def release_order(self) -> list[str]:
        """What the plan was made from after the first step; for checkpoints.

        Names in the order in which gradients became ready; under a plan that crosses the iteration
        the reverse of the order in which the forward pass needed the parameters.
        """
        return list(self._ready_names)

    def resume(self, step: int, ready_names: Sequence[str]) -> None:
        """Go on at a step, with the plan of the run that was saved."""
        self._waiter.step = step
        if self._replan is not None and ready_names:
            self._adopt(self._replan(ready_names))
            self._replan = None
        self._ready_names = list(ready_names)
        self._contribution = self._new_contribution()

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
        self.end_threads()
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()

    def end_threads(self) -> None:
        """End the threads that compress; for whoever gives up instead of closing the session."""
        if self.compressing is not None:
            self.compressing.conversations.close()

    def _adopt(self, plan: Plan) -> None:
        sizes = [parameter.numel() for _, parameter in self._named]
        check_plan(plan, [name for name, _ in self._named], sizes)
        lacking = {Op.FOLD, Op.SPREAD} - self.backend.capabilities.ops
        if plan.halves and (lacking or self._applies) and self.compressing is None:
            raise halves_refused(plan.scheduler)
        agree_on("plans", [f"{plan.scheduler} {plan.digest()}"], self._control, self.backend.size)
        by_name = dict(self._named)
        self.plan = plan
        self._parameters = [by_name[name] for name in plan.names]
        self._index = {id(p): i for i, p in enumerate(self._parameters)}
        self._fusion = GradientBuckets(plan, self._parameters)
        self._keys = describe_messages(plan)
        if self.compressing is not None:
            self.compressing.adopt(plan, self._keys, self._parameters)
        if self._applies:
            note = describe_optimizer(self._optimizer)
            install(plan, self._parameters, self._keys, self.backend, note)
        self._contribution = self._new_contribution()

    def _new_contribution(self) -> Contribution:
        optimizer = self._optimizer
        if self.compressing is not None:
            flight = self.compressing.flight(self.plan, self._fusion, self._keys, self.step)
        else:
            rate = (lambda: common_learning_rate(optimizer)) if self._applies else None
            flight = GradientReducer(
                self.plan, self._fusion, self._keys, self.backend, self.step, rate
            )
        return Contribution(flight, self._parameters, self.plan.names, self._waiter.first)

    def _hook(self, model: torch.nn.Module) -> None:
        watched = [] if self._alone else self._parameters
        self._handles += [
            p.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            for p in watched
        ]
        self._handles.append(self._optimizer.register_step_pre_hook(self._before_step))
        self._handles.append(self._optimizer.register_step_post_hook(self._after_step))
        if not self.plan.crosses_iteration or self._alone:
            return
        self._reads = ForwardHooks(model, self._about_to_read)
        self._handles += self._reads.handles
        self._handles += before_state_access(model, self._optimizer, self.flush)

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        tensor = self._index[id(parameter)]
        if self._pending is not None and tensor in self._pending.left:
            raise read_unseen(self.plan.names[tensor], self.plan.scheduler)
        if not self._sending:
            self._contribution.keep(tensor)
            return
        self._contribution.give(tensor)
        self._synchronized = False

    def _end_backward(self) -> Contribution:
        """The step's contribution, complete."""
        contribution = self._contribution
        contribution.complete()
        if contribution.absent and self._applies:
            raise unused_on_server(self.plan.names[min(contribution.absent)], self.step)
        if self._waiter.first and not self._ready_names:
            self._ready_names = [self.plan.names[i] for i in contribution.ready_order]
        return contribution

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._in_deferred_step:
            return
        refuse_closure(args, kwargs)
        if not self._alone:
            refuse_unexchanged(optimizer, self._index, self._frozen)
        crosses = self.plan.crosses_iteration and not self._waiter.first and not self._alone
        if self.compressing is not None and self.compressing.comparison.due:
            crosses = False
        if crosses and not self._synchronized:
            self._defer()
            return
        if self.plan.crosses_iteration and not self._synchronized and not self._alone:
            self._awaited = True
        self.synchronize()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._in_deferred_step:
            self._synchronized = False

    @property
    def _in_deferred_step(self) -> bool:
        return self._pending is not None and self._pending.stepping

    def _end_pending(self) -> bool:
        if self._pending is None:
            return False
        self._take(list(self._pending.left))
        self._usage.end()
        self.events = self._waiter.take_events()
        self._pending = None
        return True

    def _defer(self) -> None:
        """Remember the step; each parameter takes it when it is about to be read."""
        self._end_pending()
        contribution = self._end_backward()
        unused = self._usage.prepare(len(self._parameters), contribution.absent, self.step)
        if self.plan.halves:
            contribution.flight.spread()
        self._pending = DeferredUpdate(
            *(contribution.flight, self._parameters, self.plan.names, self.step),
            optimizer=None if self._applies else self._optimizer,
            divisor=self._divisor,
            unused=unused,
            check_finite=self._check_finite,
        )
        for parameter in self._parameters:
            parameter.grad = None
        self._end_step()

    def _about_to_read(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        if self._pending is not None and self._pending.left:
            self._take([self._index[id(p)] for p in parameters if id(p) in self._index])

    def _take(self, tensors: Sequence[int]) -> None:
        if self._pending is not None:
            self._pending.take(tensors, self._waiter.wait)

    def _take_parameters(self) -> None:
        with torch.no_grad():
            for parameter in self._parameters:
                assert parameter.grad is not None
                parameter.copy_(parameter.grad)
                parameter.grad = None
        if self._check_finite:
            norms = norms_of([p.detach() for p in self._parameters])
            refuse_non_finite(self.plan.names, self._parameters, norms, self.step, "parameter")

    def _take_means(self) -> None:
        given = [(i, p.grad) for i, p in enumerate(self._parameters) if p.grad is not None]
        tensors, gradients = [i for i, _ in given], [g for _, g in given]
        divide(gradients, self._divisor)
        if self._alone and not self._check_finite:
            return
        norms = norms_of(gradients)
        if self._check_finite:
            refuse_non_finite([self.plan.names[i] for i in tensors], gradients, norms, self.step)
        if self._alone:
            return
        # A mean that is zero everywhere may come from a parameter that no rank used: ask.
        doubtful = [tensors[position] for position in all_zero(gradients, norms)]
        if doubtful:
            for tensor in self._usage.unused(doubtful, self._contribution.absent, self.step):
                self._parameters[tensor].grad = None

    def _end_step(self) -> None:
        if self._waiter.first and not self._alone:
            self._learn_from_first_step()
        self._synchronized = True
        self._waiter.end_step()
        self._contribution = self._new_contribution()

    def _learn_from_first_step(self) -> None:
        """Adopt rank 0's order of gradients; learn whether any rank leaves parameters unused."""
        if self._reads is not None:
            needed = [self._index[id(p)] for p in self._reads.learn() if id(p) in self._index]
            if self._replan is not None:
                self._ready_names = [self.plan.names[tensor] for tensor in reversed(needed)]
        num_absent = len(self._contribution.absent)
        mine = "\n".join([str(num_absent), *self._ready_names]).encode()
        answers = self._control.all_gather("order", mine, AGREE_S, members=self.backend.size)
        self._usage.ask_always = any(answer.split(b"\n")[0] != b"0" for answer in answers)
        names = answers[0].decode().split("\n")[1:]
        if self._replan is not None:
            self._adopt(self._replan(names))
        self._ready_names = names
