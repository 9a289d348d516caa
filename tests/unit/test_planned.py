"""In a script's own loop a memory strategy plans for the shapes that it meets."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import testbed
from testbed.backends.protocol import Backend, Group
from testbed.base.errors import UsageError
from testbed.memory.running.transfers import SLACK
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


def adopted(model: nn.Module, memory: str) -> Session:
    return testbed.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.1), "gloo", memory=memory
    )


class Scaled(nn.Sequential):
    """Has parameters of its own and layers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert isinstance(loaded, nn.Module)
    return loaded


@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded])
def test_a_copy_has_its_own_weights(copied: Callable[[nn.Module], nn.Module]) -> None:
    model, x = Scaled(), torch.ones(3, 6)
    session = adopted(model, "checkpoint")
    before = model(x)
    twin = copied(copied(model))
    assert torch.equal(twin(x), before)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not twin(x).any()
    assert torch.equal(model(x), before)
    session.close()
    assert torch.equal(model(x), before)
    assert "forward" not in vars(model)


def compiled(function: Any) -> Any:
    return torch.compile(function, backend="eager")


class CompilesInside(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.finish = compiled(torch.tanh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.finish(super().forward(x))
        return made


@pytest.mark.parametrize(
    "when", ["before", "inside", "layer", "wrapped", "after", "around", "step"]
)
def test_a_compiled_model_is_refused(when: str) -> None:
    """Dynamo would see the planner, or be left out without a word."""
    model: nn.Module = CompilesInside() if when == "inside" else Scaled()
    if when == "before":
        model.compile(backend="eager")
    elif when == "layer":
        model.get_submodule("0").compile(backend="eager")
    elif when == "wrapped":
        model = compiled(model)
    if when in ("before", "inside", "layer", "wrapped"):
        with pytest.raises(UsageError, match="is compiled, and a memory strategy"):
            adopted(model, "checkpoint")
        return
    session = adopted(model, "checkpoint")
    step = model
    if when == "after":
        model.compile(backend="eager")
    elif when == "around":
        step = compiled(model)
    else:
        step = compiled(lambda x: model(x).sum())
    with pytest.raises(UsageError, match="is compiled, and a memory strategy"):
        step(torch.ones(3, 6))
    session.close()
    assert model(torch.ones(3, 6)).shape == (3, 2)
    torch._dynamo.reset()


class ShowsBoth(nn.Module):
    """An activation that may overwrite its input, and one whose input goes to the script."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.relu = nn.Linear(6, 6), nn.Linear(6, 6), nn.ReLU()
        self.hidden = nn.Sequential(nn.Tanh(), nn.Linear(6, 6), nn.ReLU())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = self.last(self.hidden(self.first(x)))
        shown = made.detach()
        return self.relu(made), shown


def test_modules_overwrite_their_input_while_the_model_runs() -> None:
    model, x = ShowsBoth(), torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    theirs = model(x)
    session = adopted(model, "inplace")
    same: list[bool] = []
    for relu in (model.hidden[2], model.relu):
        relu.register_forward_hook(lambda module, given, made: same.append(made is given[0]))
    ours = model(x)
    del same[:-2]  # of the recording
    assert same == [True, False]
    assert all(map(torch.equal, ours, theirs))
    assert not any(m.inplace for m in model.modules() if isinstance(m, nn.ReLU))
    session.close()


def movers() -> int:
    return sum(thread.name == "transfers" for thread in threading.enumerate())


def test_memory_outside_serves_all_shapes() -> None:
    """Sequences of many lengths share a thread, and memory that is hardly more than the largest."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = strategy_of("offload:min_kib=0", "none")

    def rank(backend: Backend, group: Group) -> list[int]:
        parts = (model, optimizer, backend, group.control)
        held = []
        before = movers()
        with Session(*parts, plan=plan_of("wfbp", model), strategy=strategy) as session:
            planned = PlannedModel(model, optimizer, session, group.control, strategy)
            for length in range(20, 40):
                model(torch.ones(length, 64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                held.append(planned.held_bytes)
            made = model(torch.ones(20, 64)).sum()
            assert movers() == before + 1
            assert len(planned.plans) == 20
            planned.close()
            made.backward()
            assert movers() == before
        return held

    (held,) = on_ranks(rank, 1, order=plan_of("wfbp", model).order)
    assert 0 < held[-1] <= 2 * SLACK * held[0] * 39 / 20


def test_moved_activations_outlive_the_session() -> None:
    model, x = Scaled(), torch.randn(300, 6, generator=torch.Generator().manual_seed(1))
    model(x).sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    session = adopted(model, "offload:min_kib=0")
    made = model(x).sum()
    session.close()
    before = movers()
    made.backward()
    assert movers() == before
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
