"""Recording a step leaves a model as it is, and tells what cannot be recorded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from testbed.base.errors import UsageError
from testbed.memory.inplace import may_overwrite
from testbed.memory.recording.record import record


def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    made = model(*batch)
    assert isinstance(made, torch.Tensor)
    return made.sum()


class Remembers(nn.Module):
    """Keeps tensors of its forward pass in every kind of attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("moving", torch.zeros(4))
        self.mean = torch.zeros(4)
        self.history: list[torch.Tensor] = [torch.zeros(4)]
        self.last: deque[torch.Tensor] = deque(maxlen=2)
        self.nested: dict[str, tuple[list[torch.Tensor], ...]] = {"seen": ([],)}
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.layer(x)
        self.mean = 0.9 * self.mean + made.detach().mean(0)
        self.moving = 0.9 * self.moving + self.mean
        self.history.append(self.mean)
        self.last.append(made.detach())
        self.nested["seen"][0].append(made.detach())
        self.cached = made.detach()
        self.calls += 1
        return made + self.mean


def test_the_model_is_left_as_it_is() -> None:
    model = Remembers()
    mean, moving, history = model.mean, model.moving, model.history
    record(model, loss, (torch.ones(2, 4),))
    assert model.mean is mean
    assert model.moving is moving
    assert model.history is history
    assert len(history) == 1
    assert not model.last
    assert model.nested == {"seen": ([],)}
    assert not hasattr(model, "cached")
    assert model.calls == 0
    model(torch.ones(2, 4)).sum().backward()
    assert type(model.mean) is torch.Tensor
    assert model.mean.abs().sum() > 0


class Holder:
    """No module and no container."""

    held: torch.Tensor | None = None


class KeepsElsewhere(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.helper = nn.Linear(4, 4), [Holder()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.layer(x)
        self.helper[0].held = made.detach()
        return made


def test_a_tensor_that_is_left_in_another_object_is_named() -> None:
    with pytest.raises(UsageError, match=r"in model\.helper\[0\]\.held"):
        record(KeepsElsewhere(), loss, (torch.ones(2, 4),))


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        kept.nbytes
        for state in optimizer.state.values()
        for kept in state.values()
        if isinstance(kept, torch.Tensor)
    )


class TakesAModel(torch.optim.SGD):
    """Its arguments are its own, and it keeps something beside its state."""

    def __init__(self, model: nn.Module, heat: float) -> None:
        super().__init__(model.parameters(), lr=heat, momentum=0.9)
        self.seen: list[torch.Tensor] = []

    def step(self, closure: Any = None) -> None:
        super().step()
        self.seen.append(self.param_groups[0]["params"][0].grad)


def with_schedule(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "tensor rate": lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(1e-3)),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters()),
    "ASGD": lambda m: torch.optim.ASGD(m.parameters()),
    "amsgrad": lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True),
    "of a model": lambda m: TakesAModel(m, 0.1),
    "schedule": with_schedule,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_of_optimizers_is_foreseen(name: str) -> None:
    """Frozen parameters have none, whatever they hold."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model[0].weight.requires_grad_(False)
    quantized = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    model.register_parameter("quantized", quantized)
    optimizer = OPTIMIZERS[name](model)
    before = dict(optimizer.state)  # Adagrad's is made by its constructor
    found = record(model, loss, (torch.ones(2, 8),), optimizer)
    assert dict(optimizer.state) == before
    assert not getattr(optimizer, "seen", [])
    optimizer.state.clear()
    model(torch.ones(2, 8)).sum().backward()
    optimizer = OPTIMIZERS[name](model)
    optimizer.step()
    assert found.optimizer_bytes == state_bytes(optimizer) > 0


def test_an_optimizer_that_cannot_be_foreseen_is_named() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(UsageError, match="what LBFGS keeps cannot be foreseen"):
        record(model, loss, (torch.ones(2, 4),), torch.optim.LBFGS(model.parameters()))


def test_nothing_that_is_trained_keeps_nothing() -> None:
    model = nn.Linear(4, 4)
    model.weight, model.bias = nn.Parameter(torch.empty(0, 4)), nn.Parameter(torch.empty(0))
    optimizer = torch.optim.Adam(model.parameters())
    assert record(model, loss, (torch.ones(2, 4),), optimizer).optimizer_bytes == 0


def test_sparse_gradients_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4))
    with pytest.raises(UsageError, match=r"sparse=False \(0 of"):
        record(model, loss, (torch.ones(2, dtype=torch.int64),))


class Functional(nn.Module):
    """ReLUs as functions, one as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3)
        self.second = nn.Conv2d(4, 4, 3)
        self.third = nn.Conv2d(4, 4, 3)
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = nn.functional.relu(self.second(nn.functional.relu(self.first(x))))
        return self.relu(self.third(made)).flatten(1)


def test_only_modules_overwrite_their_input_not_functions() -> None:
    batch = (torch.ones(2, 1, 12, 12),)
    assert may_overwrite(record(Functional(), loss, batch)) == ("relu",)
    nested = nn.Sequential(Functional(), nn.Linear(144, 2))
    assert may_overwrite(record(nested, loss, batch)) == ("0.relu",)
