"""Whoever saves or replaces a state finds nothing pending."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def before_state_access(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, flush: Callable[[], None]
) -> list[Any]:
    """Call `flush` before a state of the model, of its modules or of the optimizer is touched.

    Returns:
        Handles of the hooks.

    Example:
        >>> layer, seen = torch.nn.Linear(1, 1), []
        >>> handles = before_state_access(
        ...     layer, torch.optim.SGD(layer.parameters(), lr=1.0), lambda: seen.append("flushed"))
        >>> _ = layer.state_dict()
        >>> seen
        ['flushed']
    """

    def first(*ignored: Any) -> None:
        flush()

    handles: list[Any] = []
    for module in model.modules():
        handles += [
            module.register_state_dict_pre_hook(first),  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(first),  # type: ignore[no-untyped-call]
        ]
    handles.append(optimizer.register_state_dict_pre_hook(first))
    handles.append(optimizer.register_load_state_dict_pre_hook(first))
    return handles
