"""Training with a memory strategy and without, as a case that every rank runs."""

from __future__ import annotations

import torch
from torch import nn

from testbed.backends.protocol import Backend, Group
from testbed.base.plan import Plan
from testbed.training.compressed.spec import compression_of
from testbed.training.planned import PlannedModel
from testbed.training.replica import strategy_of
from testbed.training.session import Session
from tests.contracts.cases import meet

SAMPLES, WIDTH, STEPS, SEED = 32, 40, 3, 5


def build() -> nn.Module:
    """Layers whose activations are larger than a page, a normalisation and a tied weight.

    Their numbers come from a generator of their own: ranks may be threads.
    """
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    last.weight = first.weight
    model = nn.Sequential(
        first, nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), last
    ).double()
    draw = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype)
            parameter.copy_(drawn / WIDTH**0.5)
    return model


def trained(
    backend: Backend, group: Group, plan: Plan, compressor: str, memory: str
) -> list[torch.Tensor]:
    """Parameters and buffers after a few steps."""
    model = build().to(group.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.0)
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
            draw = torch.Generator().manual_seed(100 * step + group.rank)
            inputs = torch.randn(SAMPLES, WIDTH, generator=draw, dtype=torch.float64)
            optimizer.zero_grad(set_to_none=True)
            model(inputs.to(group.device)).square().mean().backward()
            optimizer.step()
        session.flush()
        if planned is not None:
            planned.close()
    meet(group, "trained with a memory strategy")
    return [t.detach().cpu().clone() for t in model.state_dict().values()]
