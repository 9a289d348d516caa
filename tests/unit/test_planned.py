"""In a script's own loop a memory strategy plans for the shapes that it meets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import testbed
from testbed.backends.protocol import Backend, Group
from testbed.base.errors import UsageError
from testbed.training.planned import PlannedModel
from testbed.training.replica import strategy_of
from testbed.training.session import Session
from tests.harness.two_ranks import on_ranks, plan_of


class Model(nn.Module):
    """Inputs by name and in a list; two outputs; a count of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 32), nn.BatchNorm1d(32)
        self.rest = nn.Sequential(nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(32, 6))

    def forward(self, pair: list[torch.Tensor], scale: float = 1.0) -> dict[str, torch.Tensor]:
        made = self.rest(self.norm(self.first(pair[0] + pair[1])))
        return {"made": made * scale, "sign": made.sign()}


def train(memory: str, scheduler: str, size: int = 2, shapes: str = "alike") -> list[list[Any]]:
    """How many plans each rank made, its parameters and its buffers."""

    models = []
    for _ in range(size):  # not by the ranks, which are threads and share the generator
        torch.manual_seed(1)
        models.append(Model())
    torch.manual_seed(1)

    def rank(backend: Backend, group: Group) -> list[Any]:
        model = models[group.rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        strategy = strategy_of(memory, "none")
        parts = (model, optimizer, backend, group.control)
        with Session(*parts, plan=plan_of(scheduler, model), strategy=strategy) as session:
            planned = None
            if strategy.choose is not None:
                planned = PlannedModel(model, optimizer, session, group.control, strategy)
            draw = torch.Generator().manual_seed(group.rank)
            for step in range(6):
                rows = 4 + (2 * (step % 2) + group.rank if shapes == "different" else 0)
                pair = [torch.randn(rows, 6, generator=draw) for _ in range(2)]
                optimizer.zero_grad()
                made = model(pair, scale=0.5)["made"]
                made.square().mean().backward()
                optimizer.step()
            model.eval()(pair)
        plans = 0
        if planned is not None:
            plans = len(planned.plans)
            planned.close()
            assert "forward" not in vars(model)
        return [plans, *model.parameters(), *model.buffers()]

    return on_ranks(rank, size, order=plan_of(scheduler, Model()).order)


@pytest.mark.parametrize("scheduler", ["wfbp", "dear", "bytescheduler"])
@pytest.mark.parametrize("memory", ["checkpoint+release", "offload:min_kib=0", "laysa"])
def test_training_is_the_same(memory: str, scheduler: str) -> None:
    """One rank, whose random numbers nobody else draws."""
    for shapes, plans in (("alike", 1), ("different", 2)):
        ours, theirs = (train(m, scheduler, 1, shapes) for m in (memory, "none"))
        assert [rank[0] for rank in ours] == [plans]
        assert all(map(torch.equal, ours[0][1:], theirs[0][1:]))


class WithoutDropout(Model):
    def __init__(self) -> None:
        super().__init__()
        self.rest[1] = nn.Identity()


@pytest.mark.parametrize("shapes", ["alike", "different"])
def test_ranks_may_see_other_shapes(shapes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are threads here, which draw from one generator; so nothing is drawn."""
    monkeypatch.setitem(globals(), "Model", WithoutDropout)
    ours, theirs = (train(m, "dear", 2, shapes) for m in ("checkpoint+release", "none"))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine[0] == (2 if shapes == "different" else 1)
        assert all(map(torch.equal, mine[1:], other[1:]))


@pytest.mark.parametrize("memory", ["checkpoint", "laysa:budget_mb=0.001"])
def test_what_cannot_be_planned_is_refused(memory: str, capsys: pytest.CaptureFixture[str]) -> None:
    frozen = memory == "checkpoint"
    model = nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = testbed.distribute(model, optimizer, "gloo", memory=memory)
    if frozen:
        model.requires_grad_(False)
    words = "no output of the model's forward pass depends" if frozen else "budget"
    with pytest.raises(UsageError, match=words):
        model(torch.ones(2, 300))
    session.close()
    assert model(torch.ones(2, 300)).shape == (2, 300)
