"""Small models that are awkward to train in parallel, and their single-process reference.

Sample and weight tensors depend on arguments alone, so every rank can build all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

STEPS = 20
DTYPES = {"float32": torch.float32, "float64": torch.float64}


class Plain(torch.nn.Module):
    """Two layers; the parts that variants leave out or add are made here too."""

    def __init__(self, variant: str) -> None:
        super().__init__()
        self.variant = variant
        self.first = torch.nn.Linear(6, 6)
        self.last = torch.nn.Linear(6, 6)
        if variant == "tied":
            self.last.weight = self.first.weight
        if variant.startswith("unused"):
            self.spare = torch.nn.Linear(6, 6)
        if variant == "empty":
            self.nothing = torch.nn.Parameter(torch.empty(0, 3))
        if variant == "huge":
            self.table = torch.nn.Parameter(torch.empty(100, 1000))

    def forward(self, inputs: torch.Tensor, rank: int, step: int) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs))
        if self.variant == "unused somewhere" and (rank + step) % 2 == 0:
            hidden = hidden + self.spare(inputs)
        if self.variant == "unused at times" and step % 3 == 0:
            hidden = hidden + self.spare(inputs)
        output: torch.Tensor = self.last(hidden)
        if self.variant == "empty":
            output = output + self.nothing.sum()
        if self.variant == "huge":
            output = output + self.table.mean()
        return output


WIDTH = 24


class Awkward(torch.nn.Module):
    """Everything at once that a scheduler may stumble over.

    A tied weight, a tensor without elements, one larger than all others together, a weight that
    another layer reads, branches whose order differs between ranks and, unless `complete`,
    parameters that are unused on some ranks, in some steps, or always.
    """

    def __init__(self, complete: bool) -> None:
        super().__init__()
        self.complete = complete
        self.nothing = torch.nn.Parameter(torch.empty(0, 3))
        self.table = torch.nn.Parameter(torch.empty(WIDTH, 2000))
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.left = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.right = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = torch.nn.Linear(4 * WIDTH, WIDTH)
        self.lent = torch.nn.Linear(WIDTH, WIDTH, bias=not complete)  # a bias is never used
        self.last = torch.nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        if not complete:
            self.somewhere = torch.nn.Linear(WIDTH, WIDTH)
            self.at_times = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor, rank: int, step: int) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs))
        if (rank + step) % 2:
            right, left = self.right(hidden), self.left(hidden)
        else:
            left, right = self.left(hidden), self.right(hidden)
        hidden = torch.tanh(self.narrow(left + right))
        if not self.complete and (rank + step) % 2 == 0:
            hidden = hidden + self.somewhere(inputs)
        if not self.complete and step % 3 == 0:
            hidden = hidden + self.at_times(inputs)
        hidden = torch.nn.functional.linear(hidden, self.lent.weight)
        output: torch.Tensor = self.last(hidden) + self.nothing.sum()
        return output + torch.tanh(inputs @ self.table).sum(1, keepdim=True) / 45


class Integers(torch.nn.Module):
    """A loss that is linear in the weights: gradients are the inputs, which are integers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.empty(6))
        self.last = torch.nn.Parameter(torch.empty(3, 2))

    def forward(self, inputs: torch.Tensor, rank: int, step: int) -> torch.Tensor:
        return inputs * self.first + inputs.flip(1) * self.last.view(-1)


@dataclass(frozen=True)
class Recipe:
    """One training that all ways must agree on.

    Attributes:
        variant: which awkwardness.
        dtype: of parameters and samples.
        accumulate: backward passes per step.
        twin: whether the naive twin can follow (all ranks use all parameters).
        optimizer: `sgd` or `adam`.
        decay: factor on the learning rate from one step to the next.
        max_norm: clip to this global norm; None = do not.
        steps: how many.
    """

    variant: str
    dtype: str = "float32"
    accumulate: int = 1
    twin: bool = True
    optimizer: str = "sgd"
    decay: float = 1.0
    max_norm: float | None = None
    steps: int = STEPS

    @property
    def width(self) -> int:
        """Features of a sample."""
        return WIDTH if self.variant in ("complete", "awkward") else 6


RECIPES = (
    Recipe("plain"),
    Recipe("plain", "float64"),
    Recipe("accumulate", accumulate=3),
    Recipe("accumulate", "float64", accumulate=3),
    Recipe("unused everywhere"),
    Recipe("unused somewhere", twin=False),
    Recipe("unused somewhere", "float64", twin=False),
    Recipe("unused at times"),
    Recipe("tied"),
    Recipe("empty"),
    Recipe("huge"),
    Recipe("integers"),
    Recipe("integers", "float64"),
)


def build(recipe: Recipe, seed: int) -> torch.nn.Module:
    """The model with weights that follow from the seed, without torch's global generator."""
    model: torch.nn.Module
    if recipe.variant == "integers":
        model = Integers()
    elif recipe.variant in ("complete", "awkward"):
        model = Awkward(complete=recipe.variant == "complete")
    else:
        model = Plain(recipe.variant)
    model.to(DTYPES[recipe.dtype])
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if recipe.variant == "integers":
                parameter.copy_(torch.randint(-4, 5, parameter.shape, generator=generator))
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return model


def optimizer_of(recipe: Recipe, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Momentum and weight decay; powers of two where all must stay exact."""
    if recipe.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.01)
    if recipe.variant == "integers":
        return torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def schedule_of(
    recipe: Recipe, optimizer: torch.optim.Optimizer
) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, recipe.decay)


def clip(recipe: Recipe, model: torch.nn.Module) -> None:
    """Means to the largest norm, if the recipe has one."""
    if recipe.max_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_norm)


def losses(recipe: Recipe, model: torch.nn.Module, rank: int, step: int) -> Iterator[torch.Tensor]:
    """One loss per backward pass of this step on this rank."""
    for turn in range(recipe.accumulate):
        generator = torch.Generator().manual_seed(10_000 * rank + 100 * step + turn)
        if recipe.variant == "integers":
            inputs = torch.randint(-8, 9, (4, 6), generator=generator).to(DTYPES[recipe.dtype])
            yield model(inputs, rank, step).sum()
        else:
            inputs = torch.randn(4, recipe.width, generator=generator).to(DTYPES[recipe.dtype])
            inputs = inputs.to(next(model.parameters()).device)
            output = model(inputs, rank, step)
            yield (output - inputs.flip(1)).square().mean() / recipe.accumulate


def parameters_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().cpu().clone() for p in model.parameters()]


def reference(recipe: Recipe, num_workers: int, seed: int) -> list[torch.Tensor]:
    """One process plays all workers: gradients summed in rank order, divided, one step.

    What no worker used has no gradient at all, so that momentum and weight decay skip it.
    """
    model = build(recipe, seed)
    optimizer = optimizer_of(recipe, model)
    schedule = schedule_of(recipe, optimizer)
    for step in range(recipe.steps):
        sums: list[torch.Tensor | None] = [None for _ in model.parameters()]
        for rank in range(num_workers):
            optimizer.zero_grad(set_to_none=True)
            for loss in losses(recipe, model, rank, step):
                loss.backward()  # type: ignore[no-untyped-call]
            for i, parameter in enumerate(model.parameters()):
                sums[i] = _add(sums[i], parameter.grad)
        for total, parameter in zip(sums, model.parameters(), strict=True):
            parameter.grad = None if total is None else total / num_workers
        clip(recipe, model)
        optimizer.step()
        schedule.step()
    return parameters_of(model)


def _add(total: torch.Tensor | None, gradient: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None or total is None:
        return total if gradient is None else gradient.clone()
    return total + gradient


Change = Callable[[int], torch.nn.Module]


def _shape(rank: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 5 + rank))


def _dtype(rank: int) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(4, 5))
    return model.double() if rank else model


def _order(rank: int) -> torch.nn.Module:
    parts = [("a", torch.nn.Linear(4, 4)), ("b", torch.nn.Linear(4, 4))]
    model = torch.nn.Module()
    for name, part in reversed(parts) if rank else parts:
        model.add_module(name, part)
    return model


def _count(rank: int) -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(2 + rank)))


DIFFERENT: dict[str, Change] = {
    "shape": _shape,
    "dtype": _dtype,
    "order": _order,
    "count": _count,
}
