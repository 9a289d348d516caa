"""Updates that wait for the next forward pass: their settings, their reads and their order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from testbed.training.exchange.setup import replanner
from testbed.training.session import Session
from tests.harness.two_ranks import TwoLayers, on_two_ranks

CROSSING = ("dear", "p3", "bytescheduler")

Steps = Callable[[torch.nn.Module, torch.optim.Optimizer], None]


def agree(
    steps: Steps,
    scheduler: str,
    build: Callable[[], torch.nn.Module],
    optimizer_of: Callable[[torch.nn.Module], torch.optim.Optimizer],
) -> None:
    """Two ranks with the same samples end where one process ends."""
    alone = build()
    steps(alone, optimizer_of(alone))

    def loop(rank: int, model: torch.nn.Module, session: Session, optimizer: torch.optim.Optimizer):
        steps(model, optimizer)
        session.flush()
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(model.get_parameter(name), parameter)

    on_two_ranks(loop, build, scheduler, optimizer_of)


def step_once(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 2)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("scheduler", CROSSING)
def test_a_learning_rate_that_is_a_tensor_is_the_steps_own(scheduler: str) -> None:
    rates: list[torch.Tensor] = []

    def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
        rate = torch.tensor(0.5)
        rates.append(rate)
        return torch.optim.Adam(model.parameters(), lr=rate)

    def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
        for _ in range(4):
            step_once(model, optimizer)
            schedule.step()
        assert any(optimizer.param_groups[0]["lr"] is rate for rate in rates)

    agree(steps, scheduler, TwoLayers, adam)


def of_the_last(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.get_submodule("last").parameters(), lr=0.01, momentum=0.5)


@pytest.mark.parametrize("scheduler", CROSSING)
def test_a_group_added_later_has_no_part_in_the_step_before(scheduler: str) -> None:
    def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(4):
            step_once(model, optimizer)
            if step == 1:
                added = list(model.get_submodule("first").parameters())
                optimizer.add_param_group({"params": added, "lr": 0.02})

    agree(steps, scheduler, TwoLayers, of_the_last)


class Normed(torch.nn.Module):
    """Weights that a hook of the layers computes from the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.utils.weight_norm(torch.nn.Linear(2, 2))
        self.last = torch.nn.utils.spectral_norm(torch.nn.Linear(2, 2))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for tensor in (*self.parameters(), *self.buffers()):
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(self.first(inputs))
        return output


def gentle(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("scheduler", CROSSING)
def test_hooks_of_a_layer_read_what_is_updated(scheduler: str) -> None:
    def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(4):
            step_once(model, optimizer)

    agree(steps, scheduler, Normed, gentle)


class Swapped(TwoLayers):
    """Called against the order in which its layers were made; `lent` is read by the model."""

    def __init__(self) -> None:
        super().__init__()
        self.lent = torch.nn.Linear(2, 2, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(self.last(inputs))
        return torch.nn.functional.linear(hidden, self.lent.weight)


@pytest.mark.parametrize("scheduler", CROSSING)
def test_the_plan_follows_the_first_steps_forward_order(scheduler: str) -> None:
    """What is read without a call of its layer is needed when the model is called: first."""
    named = list(Swapped().named_parameters())

    def loop(rank: int, model: Swapped, session: Session, optimizer: torch.optim.Optimizer):
        step_once(model, optimizer)
        assert session.plan.names == ("lent.weight", "last.weight", "first.weight")
        assert session.state_dict()["order"] == ["first.weight", "last.weight", "lent.weight"]

    on_two_ranks(loop, Swapped, scheduler, gentle, replan=replanner(scheduler, named))


def test_second_halves_leave_in_forward_order_behind_the_first() -> None:
    def loop(rank: int, model: TwoLayers, session: Session, optimizer: torch.optim.Optimizer):
        for _ in range(2):
            step_once(model, optimizer)
        session.flush()
        begun = sorted(session.events, key=lambda event: event.started_s)
        assert [(event.op, event.key) for event in begun] == [
            ("fold", "last.weight"),
            ("fold", "first.weight"),
            ("spread", "first.weight"),
            ("spread", "last.weight"),
        ]

    on_two_ranks(loop, TwoLayers, "dear:mib=1e-6", gentle)
