"""When exchanges of one training step run, as cases that every rank runs.

The order that a case shows is brought about by conditions: a rank holds something back until
another has come as far as it must.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from testbed.backends.protocol import Backend, Group
from testbed.base.plan import Plan
from testbed.base.types import Event, Op, Request
from testbed.training.session import Session
from tests.contracts.cases import MEET_S, WITHIN_S, meet
from tests.harness.watched import Watched

SMALL, LARGE, HUGE = 64, 65_536, 4_000_000  # elements
STEPS = 5


class Scale(torch.nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(size))

    def forward(self) -> torch.Tensor:
        return self.weight.sum()


class Branches(torch.nn.Module):
    """Weights that are read one after the other; the one that is read last has its gradient first.

    Args:
        sizes: elements of each branch's weight.
    """

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        for name, size in sizes.items():
            self.add_module(name, Scale(size))

    def forward(self, order: tuple[str, ...]) -> torch.Tensor:
        return torch.stack([self.get_submodule(name)() for name in order]).sum()

    def weight(self, branch: str) -> torch.nn.Parameter:
        parameter: torch.nn.Parameter = self.get_parameter(f"{branch}.weight")
        return parameter


@dataclass(frozen=True)
class Trainee:
    """A model under a session, after its first step, which is always synchronous."""

    model: Branches
    optimizer: torch.optim.Optimizer
    session: Session

    def step(self, order: tuple[str, ...]) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.model(order).backward()
        self.optimizer.step()


def _start(sizes: dict[str, int], backend: Backend, group: Group, plan: Plan) -> Trainee:
    model = Branches(sizes).to(group.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainee = Trainee(
        model, optimizer, Session(model, optimizer, backend, group.control, plan=plan)
    )
    trainee.step(tuple(sizes))
    return trainee


def two_at_once(backend: Backend, group: Group, plan: Plan) -> list[Event]:
    """A step's events. The last rank gives `a` only when the exchange of `b` has ended everywhere.

    The other ranks give `b` only when their exchange of `a` is under way.
    """
    watched = Watched(backend, lambda request: None)
    trainee = _start({"b": LARGE, "a": LARGE}, watched, group, plan)
    a, b = trainee.model.weight("a"), trainee.model.weight("b")
    ended = "the exchange of b has ended"

    def b_has_ended(_: torch.Tensor) -> None:
        watched.work_of("b.weight", trainee.session.step).wait(WITHIN_S)
        meet(group, ended)

    def a_is_under_way(_: torch.Tensor) -> None:
        watched.await_start("a.weight", trainee.session.step, WITHIN_S)

    if group.rank == group.size - 1:
        order = ("a", "b")  # so that the gradient of b comes first here
        a.register_hook(b_has_ended)
    else:
        order = ("b", "a")
        b.register_hook(a_is_under_way)
        # This hook runs after the session's, which was registered before.
        b.register_post_accumulate_grad_hook(b_has_ended)
    trainee.step(order)
    trainee.session.close()
    meet(group, "two at once")
    return trainee.session.events


def urgent_overtakes(backend: Backend, group: Group, plan: Plan) -> list[Event]:
    """A step's events. Rank 0 gives `early` when the first segment of `late` is under way.

    The other ranks give `late` only when rank 0 has given `early`, so that on rank 0 not even that
    segment can end before.
    """
    watched = Watched(backend, lambda request: None)
    trainee = _start({"early": SMALL, "late": LARGE}, watched, group, plan)
    early, late = trainee.model.weight("early"), trainee.model.weight("late")
    given = "rank 0 has given the urgent gradient"

    def late_is_under_way(gradient: torch.Tensor) -> None:
        segments = [r.key for r, _ in watched.works if r.step == trainee.session.step]
        watched.await_start(segments[0], trainee.session.step, WITHIN_S)

    if group.rank == 0:
        early.register_hook(late_is_under_way)
        # This hook runs after the session's, which was registered before.
        early.register_post_accumulate_grad_hook(lambda parameter: meet(group, given))
    else:
        late.register_hook(lambda gradient: meet(group, given))
    trainee.step(("early", "late"))
    trainee.session.close()
    meet(group, "overtaken")
    return trainee.session.events


@dataclass(frozen=True)
class Forward:
    """A forward pass: when each layer began, and the exchanges of the step before it."""

    began_s: dict[str, float]
    events: list[Event]


def gathers_during_forward(backend: Backend, group: Group, plan: Plan) -> list[Forward]:
    """Every forward pass but the first.

    The last rank begins the second halves of `middle` and `last` only when the others are inside
    the forward pass of `first`. Where a second half needs no other rank, `last` is so large that
    it cannot have come by then either.
    """
    holds = group.rank == group.size - 1

    def in_forward() -> None:
        group.control.all_gather("in forward", b"", MEET_S, members=group.size)

    def before(request: Request) -> None:
        if holds and request.op is Op.SPREAD and request.key == "middle.weight" and request.step:
            in_forward()

    sizes = {"first": SMALL, "middle": LARGE, "last": HUGE}
    trainee = _start(sizes, Watched(backend, before), group, plan)
    began_s: dict[str, float] = {}
    for name, module in trainee.model.named_children():  # behind the session's own hooks
        module.register_forward_pre_hook(_noting(name, began_s))
    forwards: list[Forward] = []
    for step in range(STEPS):
        if step == 1 and not holds:  # from here on a second half is under way
            trainee.model.get_submodule("first").register_forward_pre_hook(
                lambda module, inputs: in_forward()
            )
        trainee.optimizer.zero_grad(set_to_none=True)
        loss = trainee.model(tuple(sizes))
        trainee.session.flush()
        if step:
            forwards.append(Forward(dict(began_s), trainee.session.events))
        if step < STEPS - 1:
            loss.backward()
            trainee.optimizer.step()
    trainee.session.close()
    meet(group, "gathered")
    return forwards


def _noting(name: str, began_s: dict[str, float]) -> Callable[[torch.nn.Module, object], None]:
    def note(module: torch.nn.Module, inputs: object) -> None:
        began_s[name] = time.perf_counter()

    return note


class Busy(torch.nn.Module):
    """Multiplies by a constant again and again: a backward pass that is long without gradients."""

    def __init__(self, width: int, times: int) -> None:
        super().__init__()
        self.register_buffer("factor", torch.eye(width))
        self.times = times

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            inputs = inputs @ self.factor
        return inputs


@dataclass(frozen=True)
class Backward:
    """When a backward pass began and ended on the device, and the exchanges of its step."""

    began_s: float
    ended_s: float
    events: list[Event]


def overlaps_backward(backend: Backend, group: Group, plan: Plan, width: int) -> Backward:
    """A step on a GPU whose first gradient is ready long before the backward pass ends."""
    first, last = (torch.nn.Linear(width, width, bias=False) for _ in range(2))
    model = torch.nn.Sequential(first, Busy(width, times=100), last).to(group.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    session = Session(model, optimizer, backend, group.control, plan=plan)
    inputs = torch.randn(2 * width, width, device=group.device)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        loss = model(inputs).square().mean()
        torch.cuda.synchronize(group.device)
        began_s = time.perf_counter()
        loss.backward()
        torch.cuda.synchronize(group.device)
        ended_s = time.perf_counter()
        optimizer.step()
    session.close()
    meet(group, "overlapped")
    return Backward(began_s, ended_s, session.events)
