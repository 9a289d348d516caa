"""Hooks before a forward pass reads parameters, and before a state is saved or loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from testbed.memory.running.engine import aside

Parameters = list[torch.nn.Parameter]


class ForwardHooks:
    """Calls back before a module's forward pass with the parameters that it reads.

    A module reads its own parameters. Parameters whose module is never called itself (others read
    them directly) are announced before anything else of the model runs: when the model is called,
    or, if only its modules are called, with each of them.

    Args:
        model: watched as a whole.
        about_to_read: called with parameters, on the thread that runs the forward pass.
    """

    def __init__(self, model: torch.nn.Module, about_to_read: Callable[[Parameters], None]) -> None:
        self._model = model
        self._about_to_read = about_to_read
        self._called: dict[int, torch.nn.Module] = {}
        self._learning = True
        self._read_by_others: Parameters = []
        self._model_is_called = True
        self.handles: list[Any] = [
            # Before all others: weight_norm's own hook, say, reads parameters.
            module.register_forward_pre_hook(self._before_forward, prepend=True)
            for module in model.modules()
            if module is model or any(True for _ in module.parameters(recurse=False))
        ]

    def learn(self) -> Parameters:
        """A whole step has run: from now on it is known which modules are called.

        Returns:
            All parameters in the order in which that step needed them.
        """
        read = {
            id(parameter): parameter
            for module in self._called.values()
            for parameter in module.parameters(recurse=False)
        }
        self._read_by_others = [p for p in self._model.parameters() if id(p) not in read]
        self._model_is_called = id(self._model) in self._called
        self._called.clear()
        self._learning = False
        return [*self._read_by_others, *read.values()]

    def _before_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        if self._learning:
            self._called.setdefault(id(module), module)
        wanted = list(module.parameters(recurse=False))
        if module is self._model or not self._model_is_called:
            wanted += self._read_by_others
        with aside():
            self._about_to_read(wanted)


# No update is pending when a state is saved or replaced.


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
