"""Small models that are awkward to save memory for, and a step of their training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from testbed.base.axes import WORKLOADS
from testbed.memory.planning.lifetimes import Lifetimes
from testbed.memory.planning.plan import MemoryPlan
from testbed.memory.recording.record import Loss, record
from testbed.memory.recording.tracker import Tracker
from testbed.memory.running.engine import ActivationEngine

Batch = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A model, its loss and its samples, all from seeds."""

    build: Callable[[], nn.Module]
    loss: Loss
    samples: Callable[[int], Batch]

    def lifetimes(self, size: int) -> Lifetimes:
        """Recorded before training."""
        model = self.build()
        return record(model, self.loss, self.samples(size), sgd(model))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=0.05, momentum=0.9, foreach=False)


class Block(nn.Module):
    """As in ResNet: what is overwritten, a shortcut that is added in place."""

    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width // stride, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.short = nn.Conv2d(width // stride, width, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += self.short(x)
        out: torch.Tensor = self.relu(y)
        return out


class Dense(nn.Module):
    """As in DenseNet: each layer reads all earlier ones; pooling with indices; two halves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(n), nn.ReLU(inplace=True), nn.Conv2d(n, 4, 3, 1, 1))
            for n in (3, 7, 11)
        )
        self.pool, self.head = nn.MaxPool2d(2), nn.Linear(15 * 8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [x]
        for layer in self.layers:
            made.append(layer(torch.cat(made, 1)))
        left, right = self.pool(torch.cat(made, 1)).split(2, dim=2)
        largest, places = (left * right).flatten(1).topk(15 * 8, dim=1)
        out: torch.Tensor = self.head(largest * torch.sigmoid(places.float() / 100))
        return out


class Shared(nn.Module):
    """A layer that is called twice, tied weights, a draw from a generator of its own."""

    def __init__(self, cell: type[nn.RNNBase] = nn.GRU) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 12), nn.Linear(12, 12)
        self.last.weight = self.first.weight
        self.twice, self.norm = nn.Linear(12, 12), nn.BatchNorm1d(12)
        self.dropout, self.cell = nn.Dropout(0.3), cell(12, 12, batch_first=True)
        self.draw = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(torch.tanh(self.twice(self.first(x))))
        y = self.norm(torch.tanh(self.twice(self.dropout(y))))
        y, _ = self.cell(y[:, None, :].expand(-1, 3, -1))
        y = torch.tanh(y[:, -1]) + torch.randn(y.shape[0], 12, generator=self.draw)
        out: torch.Tensor = self.last(torch.relu_(y))
        return out


class Frozen(nn.Module):
    """A part that is not trained, its statistics at rest; a buffer that forward passes change."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
        self.base.requires_grad_(False)
        self.norm, self.head = nn.BatchNorm2d(6), nn.Linear(6, 10)
        self.rest = nn.Sequential(nn.Conv2d(6, 6, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1))
        self.register_buffer("level", torch.ones(6, 1, 1))
        with torch.no_grad():
            self.base[1].running_mean.add_(0.3)
            self.base[1].running_var.mul_(2.0)

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.base.eval()
        self.norm.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.base(x)) * self.level.clone()
        with torch.no_grad():
            self.level.mul_(0.9).add_(0.1 * y.mean((0, 2, 3))[:, None, None])
        out: torch.Tensor = self.head(self.rest(torch.tanh(y) * self.level.clone()).flatten(1))
        return out


class Spectral(nn.Module):
    """Complex numbers: conjugates and their imaginary parts are views that are read otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(12, 12), nn.Linear(12, 10)
        self.filter = nn.Parameter(torch.randn(7, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.fft.rfft(torch.tanh(self.layer(x))) * self.filter
        mixed = (y @ y.conj().T).abs() @ (y.conj().imag * y.real)
        spectrum = torch.sin(y * y.roll(1, 0).conj()) + mixed
        out: torch.Tensor = self.head(torch.fft.irfft(spectrum, n=12))
        return out


def noisy() -> nn.Module:
    """An operator draws into a tensor that was saved before: RReLU's noise."""
    return nn.Sequential(
        *(nn.Linear(12, 32), nn.RReLU(), nn.Linear(32, 32), nn.RReLU(), nn.Linear(32, 10))
    )


def images(size: int) -> Batch:
    draw = torch.Generator().manual_seed(size)
    return torch.randn(size, 3, 8, 8, generator=draw), torch.arange(size) % 10


def vectors(size: int) -> Batch:
    draw = torch.Generator().manual_seed(size)
    return torch.randn(size, 12, generator=draw), torch.arange(size) % 10


def classes(model: nn.Module, batch: Batch) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def residual() -> nn.Module:
    stem = (nn.Conv2d(3, 4, 3, 1, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
    blocks = (Block(8, 2), Block(8, 1), Block(16, 2))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def transformer(name: str) -> Case:
    """A small one, with dropout."""
    sizes = "hidden_size=16,num_layers=2,num_heads=2,vocabulary_size=128,max_sequence_length=8"
    part = WORKLOADS.resolve(f"{name}:{sizes},sequence_length=8,num_samples=64,dropout=0.1")

    def build() -> nn.Module:
        torch.manual_seed(1)
        model: nn.Module = part.build(data_dir=None, seed=3).model
        return model

    made = part.build(data_dir=None, seed=3)

    def samples(size: int) -> Batch:
        batch: Batch = made.train.batch(torch.arange(size).numpy())
        return batch

    return Case(build, made.loss, samples)


def seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        torch.manual_seed(1)
        return build().train()

    return made


CASES = {
    "residual": Case(seeded(residual), classes, images),
    "dense": Case(seeded(Dense), classes, images),
    "shared": Case(seeded(Shared), classes, vectors),
    "recurrent": Case(seeded(lambda: Shared(nn.LSTM)), classes, vectors),
    "frozen": Case(seeded(Frozen), classes, images),
    "spectral": Case(seeded(Spectral), classes, vectors),
    "noise": Case(seeded(noisy), classes, vectors),
    "bert": transformer("bert-base"),
    "gpt2": transformer("gpt2"),
}


@dataclass
class Trained:
    """What a training left: losses, gradients of each step, buffers, weights, random states."""

    tensors: list[torch.Tensor]
    peak_bytes: int
    moved_bytes: int


def train(case: Case, plan: MemoryPlan | None, size: int, to: str = "shm") -> Trained:
    """Three steps, the third of them tracked, with two micro-batches in the second."""
    model = case.build()
    optimizer = sgd(model)
    engine = ActivationEngine(plan or MemoryPlan(strategy="none"), to)  # type: ignore[arg-type]
    torch.manual_seed(2)
    kept: list[torch.Tensor] = []
    tracker = None
    for step in range(3):
        tracker = Tracker(model, optimizer)
        with tracker:
            for _ in range(2 if step == 1 else 1):
                batch = tuple(t.clone() for t in case.samples(size))
                with engine.forward():
                    loss = case.loss(model, batch)
                loss.backward()  # type: ignore[no-untyped-call]
            kept.append(loss.detach().clone())
            del loss
            optimizer.step()
        kept += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        kept += [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
        kept.append(torch.get_rng_state())
        optimizer.zero_grad(set_to_none=True)
    moved_bytes = engine.moved_bytes
    engine.close()
    assert tracker is not None
    return Trained(kept, tracker.peak_bytes, moved_bytes)
