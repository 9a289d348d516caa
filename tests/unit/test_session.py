"""What a session does with gradients, reads and states that do not come as usual."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
import torch

from testbed.backends.protocol import Backend, Group
from testbed.base.errors import UsageError
from testbed.base.plan import Message, TensorSlice
from testbed.training.exchange.unused import KEY
from testbed.training.session import Session
from tests.harness.two_ranks import (
    TwoBranches,
    TwoLayers,
    momentum,
    on_ranks,
    on_two_ranks,
    plan_of,
)


def test_a_parameter_used_only_in_an_earlier_micro_batch_keeps_its_gradient() -> None:
    ends: dict[int, tuple[float, float]] = {}

    def loop(rank: int, model: TwoBranches, session: Session, optimizer: torch.optim.Optimizer):
        for _ in range(2):  # the second step has learned the order of the first
            with session.accumulating():
                (model.a + model.b).sum().backward()
            model.a.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends[rank] = (model.a.item(), model.b.item())

    on_two_ranks(loop)
    # The second step of 2 (of 1) goes 0.5 times the first one's way once more.
    assert ends[0] == ends[1] == (1.0 - 2 * 2.5, 1.0 - 1 * 2.5)


def test_a_second_backward_pass_before_the_step_is_refused() -> None:
    def loop(rank: int, model: TwoBranches, session: Session, optimizer: torch.optim.Optimizer):
        (model.a + model.b).sum().backward()
        (model.a + model.b).sum().backward()

    with pytest.raises(UsageError, match=r"second gradient .* session.accumulating"):
        on_two_ranks(loop)


CROSSING = ("dear", "p3", "bytescheduler")


def step_once(model: TwoLayers, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def trained_alone(steps: int) -> tuple[TwoLayers, torch.optim.Optimizer]:
    model = TwoLayers()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    for _ in range(steps):
        step_once(model, optimizer)
    return model, optimizer


@pytest.mark.parametrize("scheduler", CROSSING)
def test_states_are_those_after_the_update(scheduler: str) -> None:
    """Whichever is asked for first: the model's, a layer's or the optimizer's."""
    alone, optimizer_alone = trained_alone(2)
    asked: list[dict[str, Any]] = []

    def loop(rank: int, model: TwoLayers, session: Session, optimizer: torch.optim.Optimizer):
        for _ in range(2):
            step_once(model, optimizer)
        if rank == 0:
            asked.append(model.last.state_dict())
        else:
            asked.append(optimizer.state_dict()["state"][1])

    on_two_ranks(loop, TwoLayers, scheduler)
    found = {name: value for state in asked for name, value in state.items()}
    assert torch.equal(found["weight"], alone.last.weight)
    wanted = optimizer_alone.state_dict()["state"][1]["momentum_buffer"]
    assert torch.equal(found["momentum_buffer"], wanted)


@pytest.mark.parametrize("scheduler", CROSSING)
def test_a_state_that_is_loaded_is_not_updated_by_what_was_pending(scheduler: str) -> None:
    start = TwoLayers().state_dict()

    def loop(rank: int, model: TwoLayers, session: Session, optimizer: torch.optim.Optimizer):
        for _ in range(2):
            step_once(model, optimizer)
        model.load_state_dict(start)
        session.flush()
        assert all(torch.equal(value, start[name]) for name, value in model.state_dict().items())

    on_two_ranks(loop, TwoLayers, scheduler)


@pytest.mark.parametrize("scheduler", CROSSING)
def test_layers_may_be_called_without_the_model(scheduler: str) -> None:
    alone, _ = trained_alone(3)

    def loop(rank: int, model: TwoLayers, session: Session, optimizer: torch.optim.Optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            # The last layer is never called: it is announced with any other.
            hidden = model.first(torch.ones(1, 2))
            torch.nn.functional.linear(hidden, model.last.weight).sum().backward()
            optimizer.step()
        session.flush()
        for name, parameter in alone.named_parameters():
            assert torch.equal(model.get_parameter(name), parameter), name

    on_two_ranks(loop, TwoLayers, scheduler)


def test_the_layers_of_a_message_take_one_step_together() -> None:
    taken: list[int] = []

    def loop(rank: int, model: TwoLayers, session: Session, optimizer: torch.optim.Optimizer):
        for _ in range(2):
            step_once(model, optimizer)
        assert [len(message.parts) for message in session.plan.messages] == [2]
        optimizer.register_step_post_hook(lambda *_: taken.append(rank))
        model.first(torch.ones(1, 2))
        model.last(torch.ones(1, 2))

    on_two_ranks(loop, TwoLayers, "dear")
    assert sorted(taken) == [0, 1]


class WithBias(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.last.bias = torch.nn.Parameter(torch.ones(2))


def test_what_was_updated_with_others_and_read_before_them_is_refused() -> None:
    """Autograd keeps no bias, and so does not see that it has changed."""

    def loop(rank: int, model: WithBias, session: Session, optimizer: torch.optim.Optimizer):
        for _ in range(2):
            step_once(model, optimizer)
        optimizer.zero_grad()
        early = model.last.bias + 0.0
        (model.first(torch.ones(1, 2)) + early).sum().backward()

    with pytest.raises(UsageError, match=r"'last\.bias' was read before its update"):
        on_two_ranks(loop, WithBias, "dear")


def test_who_evaluates_alone_updates_what_is_read() -> None:
    """Of other parameters, if their means are zero, it would have to ask the other rank."""
    left: dict[bool, int] = {}

    def loop(rank: int, model: TwoLayers, session: Session, optimizer: torch.optim.Optimizer):
        for _ in range(2):
            step_once(model, optimizer)
        taken: list[int] = []
        optimizer.register_step_post_hook(lambda *_: taken.append(rank))
        with torch.set_grad_enabled(rank == 0):
            model(torch.ones(1, 2))
        left[rank == 0] = len(taken)

    on_two_ranks(loop, TwoLayers, "dear")
    assert left == {True: 1, False: 2}


def test_a_tensor_in_two_messages_is_not_updated_before_both_have_come() -> None:
    of_first, of_last = TensorSlice(0, 0, 4), (TensorSlice(1, 0, 2), TensorSlice(1, 2, 4))
    messages = (Message(parts=(of_first, of_last[0])), Message(parts=(of_last[1],)))
    plan = msgspec.structs.replace(plan_of("p3", TwoLayers()), messages=messages)

    def rank(backend: Backend, group: Group) -> list[bool]:
        model = TwoLayers()
        optimizer = momentum(model)
        with Session(model, optimizer, backend, group.control, plan=plan) as session:
            for _ in range(2):
                step_once(model, optimizer)
            values = [model.last.weight.detach().clone()]
            for layer in (model.first, model.last):
                layer(torch.ones(1, 2))
                values.append(model.last.weight.detach().clone())
            session.flush()
        return [torch.equal(a, b) for a, b in itertools.pairwise(values)]

    assert on_ranks(rank, order=plan.order) == [[True, False]] * 2


def test_reading_a_parameter_before_its_update_is_refused() -> None:
    """Nothing is called here that could announce the read."""

    def loop(rank: int, model: TwoBranches, session: Session, optimizer: torch.optim.Optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            (model.a + model.b).sum().backward()
            optimizer.step()

    with pytest.raises(UsageError, match=r"'[ab]' was read before its update .* session.flush"):
        on_two_ranks(loop, TwoBranches, "dear")


class OneMayBeSpared(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1, 1, bias=False) for _ in range(2))
        for parameter in self.parameters():
            torch.nn.init.ones_(parameter)

    def forward(self, spares: bool) -> torch.Tensor:
        inputs = torch.ones(1, 1)
        output: torch.Tensor = self.layers[0](inputs)
        return output if spares else output + self.layers[1](inputs)


@pytest.mark.parametrize("scheduler", CROSSING)
@pytest.mark.parametrize("who", ["nobody", "rank 1", "rank 1, by nothing"])
def test_a_parameter_that_becomes_unused_later(scheduler: str, who: str) -> None:
    """Momentum moves it only if somebody used it, were it with a gradient of zero."""
    ends: dict[int, float] = {}

    def loop(rank: int, model: OneMayBeSpared, session: Session, optimizer: torch.optim.Optimizer):
        for step in range(3):
            optimizer.zero_grad()
            spares = step > 0 and (who == "nobody" or rank == 0)
            loss = model(spares)
            (loss * 0 if step > 0 and who.endswith("nothing") else loss).sum().backward()
            optimizer.step()
        session.flush()
        ends[rank] = model.layers[1].weight.item()

    on_two_ranks(loop, OneMayBeSpared, scheduler)
    # The first step moves it by 1; then momentum of a half goes on with a gradient of 1/2 or 0.
    after = {"nobody": 0.0, "rank 1": -1.0 - 1.0, "rank 1, by nothing": -0.5 - 0.25}
    assert ends[0] == ends[1] == after[who]


@pytest.mark.parametrize("scheduler", ["wfbp", "sequential", *CROSSING])
def test_events_tell_each_exchange_of_a_step_once(scheduler: str) -> None:
    def loop(rank: int, model: TwoLayers, session: Session, optimizer: torch.optim.Optimizer):
        for step in range(3):
            step_once(model, optimizer)
            session.flush()
            told = [(e.op, e.key, e.step) for e in session.events if e.key != KEY]
            halves = 2 if session.plan.halves else 1
            assert len(told) == len(set(told)) == halves * len(session.plan.messages)
            assert {number for _, _, number in told} == {step}

    on_two_ranks(loop, TwoLayers, scheduler)
