"""Two ranks of `ddp` as threads of a process of its own, which writes what they trained."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from testbed.backends.protocol import ExternalFramework, Group
from testbed.backends.torch_groups import DDP
from testbed.base.errors import UsageError
from testbed.control.inproc import InprocHub
from testbed.training.external_session import ExternalSession

Trained = dict[str, list[Any]]

STEPS = 5
SHAPES = ((32, 64), (64, 48), (48, 8))


def trained(**options: object) -> list[tuple[torch.Tensor, int]]:
    """Of each rank: the parameters after a few steps on its own samples, and bytes sent."""
    hub = InprocHub(2)

    def rank(number: int) -> tuple[torch.Tensor, int]:
        backend = DDP.build(Group(number, 2, hub.member(number)), DDP.options(**options))
        assert isinstance(backend, ExternalFramework)
        generator = torch.Generator().manual_seed(1)
        model = torch.nn.Sequential(*(torch.nn.Linear(*shape) for shape in SHAPES))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
        samples = torch.randn(2, STEPS, 16, SHAPES[0][0], generator=generator)[number]
        try:
            wrapped = backend.wrap(model, timeout_s=30.0)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for batch in samples:
                optimizer.zero_grad()
                wrapped(batch).square().mean().backward()
                optimizer.step()
                backend.count_step()
            return torch.cat([p.detach().flatten() for p in model.parameters()]), int(
                backend.traffic().sent_bytes
            )
        finally:
            backend.close()

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(rank, range(2)))
    return found


class Branches(torch.nn.Module):
    """Two layers, of which a step uses those that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor, used: str) -> torch.Tensor:
        parts = [layer(inputs) for name, layer in self.named_children() if name in used]
        return torch.stack(parts).sum()


def with_unused(steps: Sequence[str], **options: object) -> list[list[float | None] | str]:
    """Of each rank: the last step's gradients (their sums), or how it failed."""
    hub = InprocHub(2)

    def rank(number: int) -> list[float | None] | str:
        backend = DDP.build(Group(number, 2, hub.member(number)), DDP.options(**options))
        assert isinstance(backend, ExternalFramework)
        model = Branches()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        try:
            session = ExternalSession(model, optimizer, backend, hub.member(number), 20.0)
            with session:
                for used in steps:
                    optimizer.zero_grad()
                    session.model(torch.full((1, 4), number + 1.0), used).backward()
                    optimizer.step()
            return [None if p.grad is None else float(p.grad.sum()) for p in model.parameters()]
        except UsageError as error:
            return str(error)
        finally:
            backend.close()

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(rank, range(2)))


if __name__ == "__main__":
    settings: dict[str, dict[str, object]] = {
        "plain": {},
        "static_graph": {"static_graph": True},
        "fp16": {"hook": "fp16"},
        "powersgd": {"hook": "powersgd", "start": 2},
    }
    results: dict[str, object] = {name: trained(**given) for name, given in settings.items()}
    for name, steps in {"never b": ["a"] * 4, "at last": ["ab", "ab", "a"]}.items():
        for static in (False, True):
            results[f"{name}, {static}"] = with_unused(steps, static_graph=static)
    torch.save(results, sys.argv[1])
