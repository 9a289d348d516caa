"""Two ranks of `ddp` as threads of a process of its own, which writes what they trained."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import torch

from testbed.backends.protocol import ExternalFramework, Group
from testbed.backends.torch_groups import DDP
from testbed.control.inproc import InprocHub

Trained = dict[str, list[tuple[torch.Tensor, int]]]

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


if __name__ == "__main__":
    settings: dict[str, dict[str, object]] = {
        "plain": {},
        "static_graph": {"static_graph": True},
        "fp16": {"hook": "fp16"},
        "powersgd": {"hook": "powersgd", "start": 2},
    }
    torch.save({name: trained(**options) for name, options in settings.items()}, sys.argv[1])
