"""What is predicted is what a step takes that nobody watches: PyTorch's allocator tells.

Dispatch modes change how gradients are added, so that no tracker that is one can be the judge.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from testbed.memory.lifetimes import KEEP
from testbed.memory.simulator import simulate
from testbed.memory.storages import tensors_in
from testbed.memory.tracker import Tracker
from tests.harness.memory_models import CASES, Batch, Case, sgd

ROWS, WIDTH = 600, 40


class Tied(nn.Module):
    """The first gradient of its weights is the transposed one of a layer: never added to."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH)
        self.out = nn.Linear(WIDTH, ROWS, bias=False)
        self.out.weight = self.words.weight

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.words(indices))
        return out


class Twice(nn.Module):
    """Two gradients of its weights have storages of their own: one is added to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.words(indices).square() + self.words(indices + 1)


class Joined(nn.Module):
    """Branches, the gradients of which meet in an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(ROWS * WIDTH))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        middle = self.scale * 2.0
        return (middle * 3.0).sum() + torch.tanh(middle).sum()


def summed(model: nn.Module, batch: Batch) -> torch.Tensor:
    total: torch.Tensor = model(batch[0]).sum()
    return total


def indices(size: int) -> Batch:
    return (torch.arange(size),)


def of(build: Callable[[], nn.Module]) -> Case:
    return Case(build, summed, indices)


JOINING = {
    **{model.__name__: of(model) for model in (Tied, Twice, Joined)},
    "bert": CASES["bert"],
}


@pytest.mark.parametrize("name", JOINING)
def test_an_unwatched_step_takes_what_is_predicted(name: str) -> None:
    case = JOINING[name]
    lifetimes = case.lifetimes(4)
    model = case.build()
    optimizer = sgd(model)

    def step() -> None:
        loss = case.loss(model, tuple(t.clone() for t in case.samples(4)))
        loss.backward()  # type: ignore[no-untyped-call]
        del loss
        optimizer.step()

    def forget() -> None:
        optimizer.zero_grad(set_to_none=True)

    step()
    forget()
    state = tensors_in([list(kept.values()) for kept in optimizer.state.values()])
    there = [t.untyped_storage() for t in (*model.parameters(), *model.buffers(), *state)]
    level = peak = sum({s._cdata: s.nbytes() for s in there}.values())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watch:
        step()
    forget()
    assert watch.profiler is not None
    events = [e for e in watch.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    with Tracker(model, optimizer) as tracker:
        step()
    predicted = simulate(lifetimes, KEEP * len(lifetimes.values)).peak_bytes
    assert predicted == pytest.approx(peak, rel=2e-3)
    assert tracker.peak_bytes == pytest.approx(peak, rel=2e-3)
