"""Runs of error feedback in units of updates, with and without a mirror, to be compared."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from testbed.backends.protocol import Backend, Group
from testbed.base.axes import MEMORY, WORKLOADS
from testbed.compression.protocol import Compressor, Context, Conversation, State
from testbed.compression.sparse import unpack_sparse
from testbed.compression.sparse_mean import SparseMerger
from testbed.compression.wrappers import ErrorFeedback, FeedbackOptions
from testbed.memory.strategy import Mirror, Strategy
from testbed.training.compressed.spec import Compression
from testbed.training.session import Session
from tests.harness.compressors import resolve_compressor
from tests.harness.two_ranks import on_ranks, plan_of

TOPK = "topk:ratio=0.05"


def mirror(**options: Any) -> Strategy:
    strategy: Strategy = MEMORY.resolve("mirror").part.build(Mirror(**options))
    return strategy


@dataclass(frozen=True)
class Spied:
    """A compressor whose first payload's indices are noted."""

    inner: Compressor
    seen: dict[tuple[int, int, str], torch.Tensor] = field(compare=False, hash=False)

    @property
    def claims(self):
        return self.inner.claims

    def payload_bytes(self, *args: Any):
        return self.inner.payload_bytes(*args)

    def exchange(self, values: torch.Tensor, state: State, context: Context) -> Conversation:
        talk = self.inner.exchange(values, state, context)
        given = next(talk)
        if isinstance(given.merger, SparseMerger):
            indices, _ = unpack_sparse(given.parts[0], values)
            self.seen[context.step, context.rank, context.key] = indices
        while True:
            try:
                given = talk.send((yield given))
            except StopIteration as stop:
                return stop.value


@dataclass
class Trained:
    """How a run ended: by rank, weights and residuals times the learning rate; what was sent."""

    weights: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    kept: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    sent: dict[tuple[int, int, str], torch.Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def train(
    strategy: Strategy,
    start: nn.Module,
    loss_of: Callable[[nn.Module, int, int], torch.Tensor],
    *,
    steps: int,
    size: int = 1,
    rate: float = 0.05,
    gamma: float = 1.0,
    momentum: float = 0.0,
    scheduler: str = "wfbp",
    inner: str = TOPK,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    accumulate: int = 1,
    after_backward: Callable[[], None] = lambda: None,
) -> Trained:
    """Train on ranks that are threads; the rate is multiplied by `gamma` every 40 steps."""
    trained = Trained()
    spied = Spied(resolve_compressor(inner), trained.sent)
    compression = Compression(inner, ErrorFeedback(spied, FeedbackOptions("update")))

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        if optimizer is not None:
            return optimizer(model.parameters(), lr=rate)
        return torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)

    def loop(rank: int, model: nn.Module, session: Session, optimizer: torch.optim.Optimizer):
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 40, gamma)
        if strategy.prepare is not None:
            strategy.prepare(model, optimizer)
        for step in range(steps):
            optimizer.zero_grad()
            for part in range(accumulate - 1):
                with session.accumulating():
                    loss_of(model, rank, step * accumulate + part).backward()
            loss = loss_of(model, rank, step * accumulate + accumulate - 1)
            loss.backward()
            after_backward()
            last = optimizer.param_groups[0]["lr"]
            optimizer.step()
            schedule.step()
            if rank == 0:
                trained.losses.append(loss.item())
        session.flush()
        trained.weights[rank] = [p.detach().clone() for p in model.parameters()]
        assert session.engine is not None
        states = session.engine.driver.states
        trained.kept[rank] = {key: state["residual"] * last for key, state in states.items()}
        trained.notes.append(session.engine.result(1).note)

    plan = plan_of(scheduler, start)

    def rank(backend: Backend, group: Group) -> None:
        model = copy.deepcopy(start)
        optimizer = optimizer_of(model)
        options: dict[str, Any] = {"compression": compression, "strategy": strategy}
        with Session(model, optimizer, backend, group.control, plan=plan, **options) as session:
            loop(group.rank, model, session, optimizer)

    on_ranks(rank, size, plan.order)
    return trained


def difference(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    """|one - other| / |other| over all tensors."""
    ours, theirs = (
        torch.cat([t.double().reshape(-1) for t in tensors]) for tensors in (one, other)
    )
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-300))


def agree(one: Trained, other: Trained) -> None:
    """Equal indices at every step, weights to 1e-12, residuals to 1e-9."""
    assert one.sent.keys() == other.sent.keys()
    assert all(torch.equal(indices, other.sent[key]) for key, indices in one.sent.items())
    for rank, weights in one.weights.items():
        assert difference(weights, other.weights[rank]) < 1e-12
        kept, expected = one.kept[rank], other.kept[rank]
        assert difference(list(kept.values()), [expected[key] for key in kept]) < 1e-9


# Small models, in float64, with samples that depend on rank and step alone.


def cnn() -> nn.Module:
    first, last = nn.Conv2d(1, 4, 3, bias=False), nn.Linear(144, 10, bias=False)
    layers = (first, nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), last)
    return nn.Sequential(*layers).double()


def images(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(4, 1, 8, 8, generator=draw, dtype=torch.float64)
    targets = torch.randint(10, (4,), generator=draw)
    return nn.functional.cross_entropy(model(inputs), targets)


def tokens(name: str) -> tuple[nn.Module, Callable[..., torch.Tensor]]:
    sizes = "hidden_size=8,num_layers=1,num_heads=2,vocabulary_size=128,max_sequence_length=8"
    part = WORKLOADS.resolve(f"{name}:{sizes},sequence_length=8,num_samples=64,dropout=0")
    workload = part.build(data_dir=None, seed=3)
    model = workload.model.double()

    def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        first = (2 * step + 32 * rank) % 64
        return workload.loss(model, workload.train.batch(torch.arange(first, first + 2).numpy()))

    return model, loss_of


def linear() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 10)).double()


def squares(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1000 * rank + step)
    dtype = next(model.parameters()).dtype
    return model(torch.randn(6, 30, generator=draw).to(dtype)).square().mean()
