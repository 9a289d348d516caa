"""Training with a memory strategy and without, as a case that every rank runs."""

from __future__ import annotations

import functools

import torch
from torch import nn

from testbed.backends.protocol import Backend, Group
from testbed.base.config import RunConfig
from testbed.base.plan import Plan
from testbed.training.compressed.spec import compression_of, without_own_momentum
from testbed.training.planned import PlannedModel
from testbed.training.protocol import Run
from testbed.training.replica import strategy_of
from testbed.training.session import Session
from testbed.training.summary import Outcome
from testbed.training.trainer import train
from testbed.workloads.samples import TensorSamples
from testbed.workloads.workload import Workload
from tests.contracts.cases import meet

SAMPLES, WIDTH, STEPS, SEED = 32, 40, 3, 5
MATRIX_SAMPLES = 64  # so that LaySA does to one value or another all that can be done


def build() -> nn.Module:
    """Layers whose activations are larger than a page, a normalisation and a tied weight."""
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    last.weight = first.weight
    between = (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Sigmoid())
    model = nn.Sequential(first, nn.BatchNorm1d(WIDTH), nn.ReLU(), *between, last, nn.Tanh())
    return drawn(model.double())


def samples(seed: int) -> torch.Tensor:
    """Of one step."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(MATRIX_SAMPLES, WIDTH, generator=draw, dtype=torch.float64)


def drawn(model: nn.Module) -> nn.Module:
    """With numbers from a generator of its own: ranks may be threads."""
    draw = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            numbers = torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype)
            parameter.copy_(numbers / WIDTH**0.5)
    return model


def trained(
    backend: Backend, group: Group, plan: Plan, compressor: str, memory: str
) -> tuple[list[torch.Tensor], str]:
    """Parameters and buffers after a few steps; the actions that were carried out."""
    model = build().to(group.device)
    config = without_own_momentum(RunConfig(compressor=compressor, momentum=0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=config.momentum or 0.0)
    strategy = strategy_of(memory, compressor)
    if strategy.prepare is not None:
        strategy.prepare(model, optimizer)
    session = Session(
        *(model, optimizer, backend, group.control),
        plan=plan,
        compression=compression_of(compressor, SEED),
        strategy=strategy,
    )
    with session:
        planned = None
        if strategy.choose is not None:
            planned = PlannedModel(model, optimizer, session, group.control, strategy)
        for step in range(STEPS):
            inputs = samples(100 * step + group.rank).to(group.device)
            optimizer.zero_grad(set_to_none=True)
            model(inputs).square().mean().backward()
            optimizer.step()
        session.flush()
        actions = ""
        if planned is not None:
            actions = "".join(made.actions for made in planned.plans)
            planned.close()
    meet(group, "trained with a memory strategy")
    return [t.detach().cpu().clone() for t in model.state_dict().values()], actions


class Awkward(nn.Module):
    """A tied weight, running statistics, dropout, what no rank uses and what only rank 1 uses.

    Activations are larger than a page, so that they can be moved.
    """

    def __init__(self, rank: int, dropout: float) -> None:
        super().__init__()
        self.rank = rank
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.wide, self.norm = nn.Linear(WIDTH, 4 * WIDTH), nn.BatchNorm1d(4 * WIDTH)
        self.dropout, self.narrow = nn.Dropout(dropout), nn.Linear(4 * WIDTH, WIDTH)
        self.spare, self.somewhere = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(x))
        y = self.dropout(torch.relu(self.norm(self.wide(y))))
        y = torch.tanh(self.narrow(y))
        if self.rank == 1:
            y = y + torch.tanh(self.somewhere(x))
        out: torch.Tensor = self.last(y)
        return out


def awkward(rank: int, dropout: float) -> Workload:
    """Regression on made-up samples; the same on every rank but for what rank 1 uses."""
    model = drawn(Awkward(rank, dropout))
    draw = torch.Generator().manual_seed(SEED)
    inputs = torch.randn(8 * SAMPLES, WIDTH, generator=draw)

    def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return (model(batch[0]) - batch[0].flip(1)).square().mean()

    data = TensorSamples(inputs)
    return Workload(model=model, train=data, loss=loss, batch_size=SAMPLES, learning_rate=0.05)


def through_trainer(
    backend: Backend, group: Group, plan: Plan | None, config: RunConfig, dropout: float
) -> tuple[Outcome, dict[str, torch.Tensor]]:
    """What a run of the trainer brings home; parameters and buffers."""
    build = functools.partial(awkward, group.rank, dropout)
    workload = build()
    outcome = train(Run(config, backend, group.control, build, plan), workload)
    meet(group, "trained by the trainer")
    return outcome, workload.model.state_dict()
