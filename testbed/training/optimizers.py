"""Optimizer and learning-rate schedule of a run; and the same optimizer in words, for a server."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from testbed.base.errors import UsageError


@dataclass(frozen=True)
class OptimizerSettings:
    """What `--optimizer`, `--learning-rate` and their kin resolve to."""

    name: Literal["sgd", "adam", "adamw"]
    learning_rate: float
    momentum: float
    weight_decay: float
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: int = 0
    total_steps: int = 1


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter], settings: OptimizerSettings
) -> torch.optim.Optimizer:
    """The torch optimizer of these settings."""
    given = list(parameters)
    if settings.name == "sgd":
        return torch.optim.SGD(
            given,
            lr=settings.learning_rate,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
        )
    kind = torch.optim.Adam if settings.name == "adam" else torch.optim.AdamW
    return kind(given, lr=settings.learning_rate, weight_decay=settings.weight_decay)


def make_schedule(
    optimizer: torch.optim.Optimizer, settings: OptimizerSettings
) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up over `warmup_steps`, then constant, cosine to 0, or linear to 0."""

    def factor(step: int) -> float:
        if step < settings.warmup_steps:
            return (step + 1) / settings.warmup_steps
        rest = max(1, settings.total_steps - settings.warmup_steps)
        done = min(1.0, (step - settings.warmup_steps) / rest)
        if settings.schedule == "cosine":
            return 0.5 * (1 + math.cos(math.pi * done))
        return 1.0 - done if settings.schedule == "linear" else 1.0

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


_SERVED = {
    torch.optim.SGD: ("sgd", ("momentum", "weight_decay", "nesterov")),
    torch.optim.Adam: ("adam", ("betas", "eps", "weight_decay")),
    torch.optim.AdamW: ("adamw", ("betas", "eps", "weight_decay")),
}


def describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """The optimizer as JSON, for a server that is to run it.

    Raises:
        UsageError: a kind that servers do not know, or parameter groups that differ.
    """
    entry = _SERVED.get(type(optimizer))
    if entry is None:
        known = ", ".join(kind.__name__ for kind in _SERVED)
        raise UsageError(
            f"optimizer {type(optimizer).__name__} cannot run on a parameter server; servers know "
            f"{known}; use update=worker, where any torch optimizer runs on the workers"
        )
    name, keys = entry
    words: dict[str, Any] = {key: optimizer.param_groups[0][key] for key in keys}
    for group in optimizer.param_groups[1:]:
        if any(group[key] != words[key] for key in (*keys,)):
            raise UsageError(
                "parameter groups with settings of their own cannot run on a parameter server; "
                "give all parameters the same settings, or use update=worker"
            )
    return json.dumps({"optimizer": name, **words})


def common_learning_rate(optimizer: torch.optim.Optimizer) -> float:
    """The one learning rate of all parameter groups.

    Raises:
        UsageError: they have different ones, which a server cannot tell apart.
    """
    rate = shared_learning_rate(optimizer)
    if rate is None:
        rates = sorted({float(group["lr"]) for group in optimizer.param_groups})
        raise UsageError(
            f"parameter groups have different learning rates ({rates}); on a server that "
            "runs the optimizer all must be equal; use update=worker"
        )
    return rate


def shared_learning_rate(optimizer: torch.optim.Optimizer) -> float | None:
    """The one learning rate of all parameter groups; None: they have different ones.

    Example:
        >>> parameter = torch.nn.Parameter(torch.ones(1))
        >>> shared_learning_rate(torch.optim.SGD([parameter], lr=0.5))
        0.5
    """
    rates = {float(group["lr"]) for group in optimizer.param_groups}
    return rates.pop() if len(rates) == 1 else None
