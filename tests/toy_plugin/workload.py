"""A workload that fits a line."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from testbed.base.parts import Part
from testbed.workloads.workload import Workload


@dataclass(frozen=True)
class LineOptions:
    """Options of `toy-line`.

    Attributes:
        slope: of the line.
    """

    slope: float = 2.0


def squared_error(model: torch.nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    error: torch.Tensor = model(batch[0]) - batch[1]
    return error.square().mean()


def build(options: LineOptions, *, data_dir: str | None, seed: int) -> Workload:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(64, 1, generator=generator)
    return Workload(
        model=torch.nn.Linear(1, 1),
        train=torch.utils.data.TensorDataset(inputs, options.slope * inputs),
        loss=squared_error,
        batch_size=8,
        data="synthetic line",
    )


TOY_LINE = Part(name="toy-line", summary="fits a line", build=build, options=LineOptions)
