"""The optimizer's step in portions: each layer is updated when its own gradients have arrived."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class DeferredStep:
    """One step of any torch optimizer, taken for some parameters at a time.

    A torch optimizer keeps its state by parameter and skips parameters that it is not given, so
    that a step over all equals steps over disjoint portions, with the parameter groups and their
    settings (learning rate, momentum, ...) that held when the step was asked for.

    Args:
        optimizer: asked to step now.
        gradients: of the parameters that take part; emptied from the parameters by the caller.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._settings: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (group, {key: _frozen(value) for key, value in group.items() if key != "params"})
            for group in optimizer.param_groups
        ]

    def take(
        self, parameters: Sequence[torch.nn.Parameter], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Update these parameters alone; those without a gradient are left as they are."""
        chosen = {id(parameter) for parameter in parameters}
        groups = self._optimizer.param_groups
        kept = [dict(group) for group in groups]
        own = [parameter.grad for parameter in parameters]
        try:
            for group in groups:
                settings = next((s for g, s in self._settings if g is group), None)
                # A group that was added since then has no part in this step.
                mine = [] if settings is None else [p for p in group["params"] if id(p) in chosen]
                group.update(settings or {}, params=mine)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            type(self._optimizer).step(self._optimizer)
        finally:
            for group, before in zip(groups, kept, strict=True):
                group.update(before)
            for parameter, gradient in zip(parameters, own, strict=True):
                parameter.grad = gradient


def _frozen(value: Any) -> Any:
    """The setting as it is now: a schedule changes a learning rate that is a tensor in place."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, list | tuple):
        return type(value)(_frozen(item) for item in value)
    return value
