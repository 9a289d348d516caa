"""A workload that fits a line."""

from __future__ import annotations

from typing import Any

import torch

from testbed.workloads.workload import Workload, WorkloadKind


def squared_error(model: torch.nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    error: torch.Tensor = model(batch[0]) - batch[1]
    return error.square().mean()


def build(*, slope: float, seed: int, **_: Any) -> Workload:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(64, 1, generator=generator)
    return Workload(
        model=torch.nn.Linear(1, 1),
        train=torch.utils.data.TensorDataset(inputs, slope * inputs),
        loss=squared_error,
        batch_size=8,
        data="synthetic line",
    )


TOY_LINE = WorkloadKind(name="toy-line", summary="fits a line", build=build, options={"slope": 2.0})
