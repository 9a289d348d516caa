"""A memory strategy: the optimizer takes its step one tensor at a time."""

from __future__ import annotations

import torch

from testbed.base.parts import NoOptions, Part
from testbed.memory.strategy import Strategy


def one_by_one(options: NoOptions) -> Strategy:
    """PyTorch's steps for all tensors at once hold temporary copies of them; these do not."""

    def prepare(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["foreach"] = False

    return Strategy(prepare=prepare)


TOY_ONE_BY_ONE = Part(
    name="toy-one-by-one",
    summary="the optimizer's step, one tensor at a time",
    build=one_by_one,
)
