"""The driver: gradients leave as the plan says, and are means before parameters are updated."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from testbed.backends.protocol import Backend, Work
from testbed.control.protocol import Control
from testbed.nouns import Event, Verb
from testbed.scheduling.check import check_plan
from testbed.scheduling.plan import Plan
from testbed.training.agreement import AGREE_S, agree_on
from testbed.training.deferred import DeferredStep
from testbed.training.digest import describe_tensors
from testbed.training.flight import Flight
from testbed.training.fusion import Fusion, describe_messages
from testbed.training.means import divide, refuse_non_finite, silent
from testbed.training.optimizers import common_learning_rate, describe_optimizer
from testbed.training.plans import Replan, replanner
from testbed.training.reading import ReadWatch
from testbed.training.refusals import (
    halves_refused,
    second_gradient,
    sparse_gradient,
    unused_on_server,
    unused_too_late,
)
from testbed.training.start import install, share_start
from testbed.training.usage import KEY, submit_votes, unused
from testbed.training.waiting import Waiter


class Session:
    """One rank's part in data-parallel training of a model.

    Hooks itself to the model and the optimizer: `loss.backward()` sends messages as soon as the
    plan lets them go, `optimizer.step()` first waits until all gradients are means over the
    workers. Call `synchronize()` yourself only to see the means earlier (clipping, scaling).

    Under a plan that crosses the iteration `optimizer.step()` returns at once; each layer is then
    updated just before its next forward pass. `flush()` ends what is pending, and happens by itself
    before a `state_dict()`.

    With a backend that runs the optimizer on servers (`Verb.APPLY`), parameters come back instead
    of gradients, and `optimizer.step()` finds nothing left to do.

    Args:
        model: built alike on all ranks; rank 0's parameters and buffers replace the others'.
        optimizer: any torch optimizer of the model's parameters.
        backend: opened with the plan's order and channels.
        control: the job's control plane.
        plan: None = one message per tensor as it gets ready (wait-free backpropagation).
        replan: makes the plan anew, once, from the order in which the first step's gradients came
            on rank 0; None = the given plan stays (without a plan: wait-free backpropagation).
        patience_s: how long to wait for a gradient when all ranks have been fast so far.
        check_finite: report NaN and infinity (off where a gradient scaler looks for them).
        on_resume: called whenever training goes on after it stood waiting for a message.
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
    ) -> None:
        self.backend = backend
        self.events: list[Event] = []
        self._control = control
        self._optimizer = optimizer
        self._waiter = Waiter(control, patience_s, on_resume)
        self._check_finite = check_finite
        self._named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self._sending = True
        self._synchronized = False
        self._stepping = False
        self._leave: Callable[[], None] | None = None
        self._ready_names: list[str] = []
        self._reads: ReadWatch | None = None
        self._applies = Verb.APPLY in backend.capabilities.verbs
        # A sum over one worker is the gradient itself: nothing is sent and nothing is hooked.
        self._alone = backend.size == 1 and not self._applies
        agree_on("parameters", describe_tensors(self._named), control, backend.size)
        self._replan = None if self._applies else replan
        if plan is None:
            replan = replan or replanner("wfbp", self._named)
            self._replan = None if self._applies else replan
            plan = replan([name for name, _ in reversed(self._named)])
        share_start(model, backend)
        self._deferred: DeferredStep | None = None
        self._pending: dict[int, Flight] = {}
        self._votes: Work | None = None
        self._vote_always = False
        self._absent: set[int] = set()
        self._accumulated: set[int] = set()
        self._late: list[int] = []
        self._adopt(plan)
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
        """
        if self._synchronized:
            return
        self.flush()
        if not self._alone:
            self._end_backward()
            for number in self._flight.works:
                self._wait(self._flight, number)
            for tensor in range(len(self._parameters)):
                self._parameters[tensor].grad = self._flight.collect(tensor)
        if self._applies:
            self._take_parameters(range(len(self._parameters)))
        else:
            self._take_means()
        self._end_step()

    def flush(self) -> None:
        """Update every parameter whose update is still pending."""
        self._settle(list(self._pending))
        self._deferred = None

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
        """Names in the order in which gradients became ready in the first step; for checkpoints."""
        return list(self._ready_names)

    def resume(self, step: int, ready_names: Sequence[str]) -> None:
        """Go on at a step, with the plan of the run that was saved."""
        self._waiter.step = step
        if self._replan is not None and ready_names:
            self._adopt(self._replan(ready_names))
            self._replan = None
        self._ready_names = list(ready_names)
        self._flight = self._new_flight()

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
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()

    def _adopt(self, plan: Plan) -> None:
        sizes = [parameter.numel() for _, parameter in self._named]
        check_plan(plan, [name for name, _ in self._named], sizes)
        lacking = {Verb.FOLD, Verb.SPREAD} - self.backend.capabilities.verbs
        if plan.halves and (lacking or self._applies):
            raise halves_refused(plan.scheduler)
        agree_on("plans", [f"{plan.scheduler} {plan.digest()}"], self._control, self.backend.size)
        by_name = dict(self._named)
        self.plan = plan
        self._parameters = [by_name[name] for name in plan.names]
        self._index = {id(p): i for i, p in enumerate(self._parameters)}
        self._fusion = Fusion(plan, self._parameters)
        self._keys = describe_messages(plan)
        if self._applies:
            note = describe_optimizer(self._optimizer)
            install(plan, self._parameters, self._keys, self.backend, note)
        self._flight = self._new_flight()

    def _new_flight(self) -> Flight:
        optimizer = self._optimizer
        rate = (lambda: common_learning_rate(optimizer)) if self._applies else None
        return Flight(self.plan, self._fusion, self._keys, self.backend, self.step, rate)

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
        self._reads = ReadWatch(model, self._about_to_read)
        self._handles += self._reads.handles
        self._handles.append(
            model.register_state_dict_pre_hook(  # type: ignore[no-untyped-call]
                lambda module, prefix, keep_vars: self.flush()
            )
        )

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        index = self._index[id(parameter)]
        if not self._sending:
            self._accumulated.add(index)
            return
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            raise sparse_gradient(self.plan.names[index])
        if not gradient.is_contiguous():
            gradient = gradient.contiguous()
            parameter.grad = gradient
        if self._flight.has(index):
            raise second_gradient(self.plan.names[index])
        self._synchronized = False
        self._flight.give(index, gradient)

    def _end_backward(self) -> None:
        """Complete the step's messages: what this rank did not use counts as zero elsewhere."""
        for index, parameter in enumerate(self._parameters):
            if self._flight.has(index):
                continue
            if index in self._accumulated and parameter.grad is not None:
                self._late.append(index)  # used in an earlier micro-batch, not in the last
            else:
                zeros = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
                parameter.grad = zeros
                self._absent.add(index)
                self._late.append(index)
        if self._absent and self._applies:
            raise unused_on_server(self.plan.names[min(self._absent)], self.step)
        observed = list(self._flight.ready_order)
        for index in reversed(self._late):
            gradient = self._parameters[index].grad
            assert gradient is not None
            self._flight.give(index, gradient)
        self._flight.end_backward()
        if self._waiter.first and not self._ready_names:
            order = (*observed, *reversed(self._late))
            self._ready_names = [self.plan.names[i] for i in order]
        if self.plan.halves:
            self._flight.spread(range(len(self._parameters)))

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._stepping:
            return
        crosses = self.plan.crosses_iteration and not self._waiter.first and not self._alone
        if crosses and not self._synchronized:
            self._defer()
        else:
            self.synchronize()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._stepping:
            self._synchronized = False

    def _defer(self) -> None:
        """Remember the step; each parameter takes it when it is about to be read."""
        self.flush()
        self._end_backward()
        if self._absent and not self._vote_always:
            name = self.plan.names[min(self._absent)]
            raise unused_too_late(name, self.step, self.plan.scheduler)
        if self._vote_always:
            self._votes = self._ask(range(len(self._parameters)))
        self._deferred = DeferredStep(self._optimizer)
        self._pending = dict.fromkeys(range(len(self._parameters)), self._flight)
        for parameter in self._parameters:
            parameter.grad = None
        self._end_step()
        self._synchronized = True

    def _about_to_read(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        if self._pending:
            wanted = [self._index.get(id(parameter), -1) for parameter in parameters]
            self._settle([index for index in wanted if index in self._pending])

    def _settle(self, tensors: Sequence[int]) -> None:
        """Wait for these tensors' messages and update their parameters."""
        if not tensors:
            return
        flight = self._pending[tensors[0]]
        for tensor in tensors:
            del self._pending[tensor]
            for number in flight.messages_of(tensor):
                self._wait(flight, number)
        unused = self._unused()
        parameters = [self._parameters[t] for t in tensors]
        gradients = [flight.collect(t) for t in tensors]
        if self._applies:
            with torch.no_grad():
                for parameter, value in zip(parameters, gradients, strict=True):
                    parameter.copy_(value)
            return
        divide(gradients, self._divisor)
        if self._check_finite:
            refuse_non_finite([self.plan.names[t] for t in tensors], gradients, self.step - 1)
        assert self._deferred is not None
        used = [None if t in unused else g for t, g in zip(tensors, gradients, strict=True)]
        self._stepping = True
        try:
            self._deferred.take(parameters, used)
        finally:
            self._stepping = False

    def _wait(self, flight: Flight, number: int) -> None:
        for work in flight.works_of(number):
            self._waiter.wait(work, flight.key(number))

    def _take_parameters(self, tensors: Sequence[int]) -> None:
        with torch.no_grad():
            for tensor in tensors:
                parameter = self._parameters[tensor]
                assert parameter.grad is not None
                parameter.copy_(parameter.grad)
                parameter.grad = None
        if self._check_finite:
            names = [self.plan.names[t] for t in tensors]
            values = [self._parameters[t] for t in tensors]
            refuse_non_finite(names, values, self.step, what="parameter")

    def _take_means(self) -> None:
        given = [(i, p.grad) for i, p in enumerate(self._parameters) if p.grad is not None]
        tensors, gradients = [i for i, _ in given], [g for _, g in given]
        divide(gradients, self._divisor)
        if self._check_finite:
            refuse_non_finite([self.plan.names[i] for i in tensors], gradients, self.step)
        if self._alone:
            return
        # A mean that is zero everywhere may come from a parameter that no rank used: ask. All
        # ranks hold the same means bit for bit, so all of them ask in the same step.
        doubtful = [tensors[position] for position in silent(gradients)]
        if doubtful:
            counts = self._waiter.wait(self._ask(doubtful), KEY).tensor
            for index in unused(doubtful, counts):
                self._parameters[index].grad = None

    @property
    def _divisor(self) -> int:
        return 1 if self.backend.capabilities.consistency == "none" else self.backend.size

    def _ask(self, tensors: Sequence[int]) -> Work:
        device = self._parameters[0].device
        return submit_votes(tensors, self._absent, self.backend, self.step, device)

    def _unused(self) -> set[int]:
        if self._votes is None:
            return set()
        counts = self._waiter.wait(self._votes, KEY).tensor
        return unused(range(len(self._parameters)), counts)

    def _end_step(self) -> None:
        if self._waiter.first and not self._alone:
            self._learn_from_first_step()
        self._synchronized = True
        self.events = self._waiter.take_events()
        self._waiter.end_step()
        self._absent, self._accumulated, self._late = set(), set(), []
        self._flight = self._new_flight()

    def _learn_from_first_step(self) -> None:
        """Adopt rank 0's order of gradients; learn whether any rank leaves parameters unused."""
        mine = "\n".join([str(len(self._absent)), *self._ready_names]).encode()
        answers = self._control.all_gather("order", mine, AGREE_S, members=self.backend.size)
        self._vote_always = any(answer.split(b"\n")[0] != b"0" for answer in answers)
        names = answers[0].decode().split("\n")[1:]
        if self._replan is not None:
            self._adopt(self._replan(names))
        self._ready_names = names
        if self._reads is not None:
            self._reads.learn()
