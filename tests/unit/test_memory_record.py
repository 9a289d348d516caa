"""Recording a step leaves a model as it is, and tells what cannot be recorded."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch import nn

from testbed.base.errors import UsageError
from testbed.memory.record import record


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
    assert model.mean is mean and model.moving is moving
    assert model.history is history and len(history) == 1
    assert not model.last and model.nested == {"seen": ([],)}
    assert not hasattr(model, "cached") and model.calls == 0
    model(torch.ones(2, 4)).sum().backward()
    assert type(model.mean) is torch.Tensor and model.mean.abs().sum() > 0


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
