"""What `optimizer.step()` may not be asked for: gradients that no exchange has seen."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch

from testbed.training.exchange.refusals import closure_refused, never_exchanged


def refuse_closure(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Look at the arguments of `step()` as a pre-hook gets them, the optimizer first.

    Raises:
        UsageError: a closure is among them.
    """
    if any(value is not None for value in (*args[1:], kwargs.get("closure"))):
        raise closure_refused()


def refuse_unexchanged(
    optimizer: torch.optim.Optimizer, exchanged: Container[int], others: Mapping[int, str]
) -> None:
    """Look for gradients that the optimizer would use as they are on this rank.

    Args:
        optimizer: about to step.
        exchanged: `id` of each parameter whose gradient is.
        others: names of the model's other parameters, by `id`.

    Raises:
        UsageError: names the first such parameter.
    """
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if parameter.grad is not None and id(parameter) not in exchanged:
                unnamed = f"parameter {place} of the optimizer's group {number}"
                name = others.get(id(parameter))
                raise never_exchanged(unnamed if name is None else repr(name))
