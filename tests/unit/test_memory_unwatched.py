"""What is predicted is what a step takes that nobody watches: PyTorch's allocator tells.

Dispatch modes change how gradients are added, so that no tracker that is one can be the judge.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from testbed.memory.planning.lifetimes import KEEP
from testbed.memory.planning.simulator import simulate
from testbed.memory.recording.storages import tensors_in
from testbed.memory.recording.tracker import CATEGORIES, Tracker
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


class Adds(torch.autograd.Function):
    """Adds in its backward pass, where both terms are its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 2 + gradient * 3


class Added(nn.Module):
    """Sums in the backward pass that are not the engine's: each is a tensor of its own."""

    def __init__(self, forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(ROWS * WIDTH))
        self.run = forward

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.run(self.scale)


def hooked(x: torch.Tensor) -> torch.Tensor:
    y = x * 1.0
    y.register_hook(lambda gradient: gradient.mul(2) + gradient.mul(3))
    return y


def again(x: torch.Tensor) -> torch.Tensor:
    """A residual connection that is made again in the backward pass."""

    def layer(x: torch.Tensor) -> torch.Tensor:
        return (x.mul(2) + x.mul(3)).exp()

    made: torch.Tensor = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)
    return made.tanh()


def statistics(x: torch.Tensor) -> torch.Tensor:
    """Their backward pass is one node, which adds."""
    variance, mean = torch.var_mean(x.view(-1, 2).tanh(), 0)
    return variance + mean


def squared(x: torch.Tensor) -> torch.Tensor:
    """The node of the product gives two gradients of one tensor."""
    y = x * 2.0
    return (y * y).tanh()


ADDED = {"Function": Adds.apply, "hook": hooked, "checkpoint": again}
ADDED |= {"var_mean": statistics, "square": squared}


def summed(model: nn.Module, batch: Batch) -> torch.Tensor:
    total: torch.Tensor = model(batch[0]).sum()
    return total


def indices(size: int) -> Batch:
    return (torch.arange(size),)


def of(build: Callable[[], nn.Module]) -> Case:
    return Case(build, summed, indices)


JOINING = {
    **{model.__name__: of(model) for model in (Tied, Twice, Joined)},
    **{name: of(functools.partial(Added, forward)) for name, forward in ADDED.items()},
    "bert": CASES["bert"],
}


def most_allocated(step: Callable[[], None]) -> int:
    """Bytes that PyTorch's allocator hands out in a step, at most at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watch:
        step()
    assert watch.profiler is not None
    events = [e for e in watch.profiler.kineto_results.events() if e.name() == "[memory]"]
    ordered = sorted(events, key=lambda event: event.start_ns())
    return max(itertools.accumulate((event.nbytes() for event in ordered), initial=0))


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
    peak = sum({s._cdata: s.nbytes() for s in there}.values()) + most_allocated(step)
    forget()
    with Tracker(model, optimizer) as tracker:
        step()
    predicted = simulate(lifetimes, KEEP * len(lifetimes.values)).peak_bytes
    assert predicted == pytest.approx(peak, rel=2e-3)
    assert tracker.peak_bytes == pytest.approx(peak, rel=2e-3)


def test_gradients_that_have_a_graph_are_not_added_in_place() -> None:
    model = Joined()
    batch = torch.zeros(1)

    def step() -> None:
        torch.autograd.grad(model(batch).sum(), list(model.parameters()), create_graph=True)

    step()
    with Tracker(model, sgd(model)) as tracker:
        before = tracker.live_bytes
        step()
    assert tracker.peak_bytes - before == pytest.approx(most_allocated(step), rel=2e-3)


class Held(torch.autograd.Function):
    """Its gradient is held by somebody else, too: none is added to it in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, held: list[torch.Tensor]) -> torch.Tensor:
        ctx.held = held
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.held.append(gradient * 2.0)
        return ctx.held[-1], None


def joined(scale: torch.Tensor, held: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    middle = scale * 2.0
    return middle, Held.apply(middle, held).sum() + Held.apply(middle, held).sum()


def test_a_sum_counts_as_what_it_is_for_whatever_comes_next() -> None:
    model = Joined()
    bucket = torch.empty(100)
    tracker = Tracker(model, sgd(model))
    with tracker:
        middle, loss = joined(model.scale, [])
        middle.register_hook(lambda gradient: tracker.saw([bucket], "communication"))
        loss.backward()  # type: ignore[no-untyped-call]
    sent = CATEGORIES.index("communication")
    assert max(level[sent] for level in tracker.curve) == bucket.nbytes


def test_a_sum_is_not_held_when_the_tracker_has_ended() -> None:
    model = Joined()
    tracker = Tracker(model, sgd(model))
    held: list[torch.Tensor] = []
    with tracker:
        middle, loss = joined(model.scale, held)
        (gradient,) = torch.autograd.grad(loss, [middle])
    there = weakref.ref(gradient.untyped_storage())
    del gradient
    assert there() is None
