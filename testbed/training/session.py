"""The driver: gradients leave as autograd makes them, and are means when the optimizer steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from testbed.backends.protocol import Backend, Order, Work
from testbed.control.protocol import Control
from testbed.errors import DeadlineExceeded, NonFiniteGradient, UsageError
from testbed.nouns import Combined, Event, Request, Verb
from testbed.training.agreement import AGREE_S, agree_on
from testbed.training.digest import describe_tensors
from testbed.training.optimizers import describe_optimizer
from testbed.training.release import InOrderRelease


class Session:
    """One rank's part in data-parallel training of a model.

    Hooks itself to the model and the optimizer: `loss.backward()` sends each gradient as soon as
    it is accumulated, `optimizer.step()` first waits until all are means over the workers. Call
    `synchronize()` yourself only to see the means earlier (clipping, gradient scaling).

    With a backend that runs the optimizer on servers (`Verb.APPLY`), parameters come back instead
    of gradients, and `optimizer.step()` finds nothing left to do.

    Args:
        model: built alike on all ranks; rank 0's parameters and buffers replace the others'.
        optimizer: any torch optimizer of the model's parameters.
        backend: opened.
        control: the job's control plane.
        order: how the backend's channels pick requests (as it was opened).
        patience_s: how long to wait for a gradient when all ranks have been fast so far.
        check_finite: report NaN and infinity (off where a gradient scaler looks for them).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        backend: Backend,
        control: Control,
        *,
        order: Order = "fifo",
        patience_s: float = 10.0,
        check_finite: bool = True,
    ) -> None:
        self.backend = backend
        self.step = 0
        self.exposed_s = 0.0
        self.staleness: int | None = None
        self.events: list[Event] = []
        self._control = control
        self._optimizer = optimizer
        self._patience_s = patience_s
        self._check_finite = check_finite
        self._in_order = order == "fifo"
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._index = {id(p): i for i, p in enumerate(self._parameters)}
        self._works: list[tuple[int, Work]] = []
        self._absent: set[int] = set()
        self._sending = True
        self._leave: Callable[[], None] | None = None
        self._synchronized = False
        self._step_began_s = time.perf_counter()
        self._slowest_step_s = 0.0
        self._applies = Verb.APPLY in backend.capabilities.verbs
        agree_on("parameters", describe_tensors(named), control, backend.size)
        self._share_start(model)
        self._order = list(reversed(range(len(named))))
        self._release = InOrderRelease(self._order)
        # A sum over one worker is the gradient itself: nothing is sent and nothing is hooked.
        self._alone = backend.size == 1 and not self._applies
        self._handles: list[Any] = [
            p.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            for p in ([] if self._alone else self._parameters)
        ]
        self._handles.append(optimizer.register_step_pre_hook(self._before_step))
        self._handles.append(optimizer.register_step_post_hook(self._after_step))

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
        if not self._alone:
            self._send_absent()
        before_s = time.perf_counter()
        results = {index: self._wait(work, self._names[index]) for index, work in self._works}
        self.exposed_s = time.perf_counter() - before_s
        self.events = [work.event for _, work in self._works]
        stale = [r.staleness for r in results.values() if r.staleness is not None]
        self.staleness = max(stale, default=None)
        if self._applies:
            self._take_parameters()
        else:
            self._take_means()
        self._end_step()

    @property
    def release_order(self) -> list[int]:
        """The agreed order in which gradients leave; part of a checkpoint."""
        return list(self._order)

    def resume(self, step: int, order: Sequence[int]) -> None:
        """Go on at a step, with the order of the run that was saved."""
        self.step = step
        self._order = list(order)
        self._release = InOrderRelease(self._order)

    def on_close(self, leave: Callable[[], None]) -> None:
        """Call this once when the session is closed; for whoever opened the backend for it."""
        self._leave = leave

    def close(self) -> None:
        """Take the hooks off; ends the backend only if the session was given that to do."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()

    def _share_start(self, model: torch.nn.Module) -> None:
        backend = self.backend
        note = describe_optimizer(self._optimizer) if self._applies else ""
        works: list[tuple[torch.Tensor, torch.Tensor, Work]] = []
        with torch.no_grad():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                installs = self._applies and id(tensor) in self._index
                verb = Verb.INSTALL if installs else Verb.BROADCAST
                if tensor.dtype is torch.bool:
                    continue  # masks are constants of the architecture
                plain = tensor.detach().clone(memory_format=torch.contiguous_format)
                request = Request(verb, plain, key=name, step=-1, note=note)
                works.append((tensor, plain, backend.submit(request)))
            for tensor, plain, work in works:
                work.wait(AGREE_S)
                tensor.copy_(plain)

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if not self._sending:
            return
        index = self._index[id(parameter)]
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            raise UsageError(
                f"gradient of {self._names[index]!r} is a sparse tensor; dense ones are exchanged "
                "here; build the embedding with sparse=False"
            )
        if not gradient.is_contiguous():
            parameter.grad = gradient.contiguous()
        if self._release.is_ready(index):
            raise UsageError(
                f"{self._names[index]!r} got a second gradient before optimizer.step(); to "
                "accumulate, run all backward passes but the last inside session.accumulating()"
            )
        self._synchronized = False
        released = self._release.ready(index)
        for item in released if self._in_order else [index]:
            self._send(item)

    def _send(self, index: int) -> None:
        parameter = self._parameters[index]
        request = Request(
            Verb.APPLY if self._applies else Verb.SUM,
            parameter.grad,
            key=self._names[index],
            step=self.step,
            priority=index,
            channel=index % self.backend.capabilities.num_channels,
            learning_rate=self._learning_rate(parameter) if self._applies else 0.0,
        )
        self._works.append((index, self.backend.submit(request)))

    def _send_absent(self) -> None:
        """What this rank did not use counts as zero, if any other rank used it."""
        rest = self._release.rest()
        late = rest if self._in_order else [i for i in rest if not self._release.is_ready(i)]
        for index in late:
            if not self._release.is_ready(index):
                self._parameters[index].grad = torch.zeros_like(
                    self._parameters[index], memory_format=torch.contiguous_format
                )
                self._absent.add(index)
            self._send(index)

    def _wait(self, work: Work, name: str) -> Combined:
        if not work.done():
            self._control.set_state(f"waiting for the exchange of {name!r} in step {self.step}")
        # A rank that computes for long is no rank that hangs: what was slow may be slow again.
        limit_s = max(self._patience_s, 2 * self._slowest_step_s)
        if self.step == 0:
            limit_s = max(limit_s, AGREE_S)  # first steps compile, allocate and connect
        try:
            return work.wait(limit_s)
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"{error}; {self._control.describe()}") from error

    def _take_parameters(self) -> None:
        with torch.no_grad():
            for parameter in self._parameters:
                assert parameter.grad is not None
                parameter.copy_(parameter.grad)
                parameter.grad = None
        if self._check_finite:
            self._refuse_non_finite(self._parameters, "parameter")

    def _take_means(self) -> None:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if not gradients:
            return
        if self.backend.capabilities.consistency != "none" and self.backend.size > 1:
            torch._foreach_div_(gradients, float(self.backend.size))
        norms = [float(n) for n in torch._foreach_norm(gradients)]
        if self._check_finite and not all(map(_is_finite, norms)):
            self._refuse_non_finite(gradients, "gradient")
        if self._alone:
            return
        silent = [i for i, n in enumerate(norms) if n == 0.0 and self._parameters[i].numel() > 0]
        if silent:
            self._drop_unused(silent)

    def _drop_unused(self, silent: Sequence[int]) -> None:
        """A mean that is zero everywhere may come from a parameter that no rank used: ask.

        All ranks hold the same means bit for bit, so all of them ask in the same step.
        """
        used = [0 if i in self._absent else 1 for i in silent]
        votes = torch.tensor(used, dtype=torch.int32)
        device = self._parameters[0].device
        if device.type not in self.backend.capabilities.device_types or device.type != "cpu":
            votes = votes.to(device)
        request = Request(Verb.SUM, votes, key="(parameters in use)", step=self.step)
        self._wait(self.backend.submit(request), request.key)
        for index, count in zip(silent, votes.tolist(), strict=True):
            if count == 0:
                self._parameters[index].grad = None

    def _refuse_non_finite(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        for name, tensor in zip(self._names, tensors, strict=True):
            if not bool(torch.isfinite(tensor).all()):
                bad = "NaN" if bool(torch.isnan(tensor).any()) else "infinite values"
                raise NonFiniteGradient(
                    f"{what} of {name!r} has {bad} after the exchange of step {self.step}; "
                    "expected finite numbers; lower the learning rate or clip with --clip-norm"
                )

    def _end_step(self) -> None:
        if self.step == 0 and self._in_order and not self._alone:
            self._adopt_order()
        self._release = InOrderRelease(self._order)
        self._works.clear()
        self._absent.clear()
        self._synchronized = True
        now_s = time.perf_counter()
        if self.step > 0:
            own_s = now_s - self._step_began_s - self.exposed_s
            self._slowest_step_s = max(self._slowest_step_s, own_s)
        self._step_began_s = now_s
        self.step += 1
        self._control.set_state(f"computing step {self.step}")

    def _adopt_order(self) -> None:
        """From the second step on gradients leave in the order in which rank 0 saw them come."""
        mine = ",".join(map(str, self._release.observed())).encode()
        answers = self._control.all_gather("order", mine, AGREE_S, members=self.backend.size)
        self._order = [int(word) for word in answers[0].decode().split(",") if word]

    def _learning_rate(self, parameter: torch.Tensor) -> float:
        groups = self._optimizer.param_groups
        if len(groups) == 1:
            return float(groups[0]["lr"])
        mine = next(g for g in groups if any(p is parameter for p in g["params"]))
        return float(mine["lr"])

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.synchronize()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._synchronized = False


def _is_finite(value: float) -> bool:
    return value - value == 0.0
