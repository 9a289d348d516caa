"""One step of any torch optimizer, for some parameters at a time; of large ones slice by slice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from testbed.base.listed import elements
from testbed.memory.host import is_on_host, zeros_on_host
from testbed.training.exchange.refusals import changed_setting

ELEMENTWISE: Final = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Optimizers that update each element from its own gradient and state alone."""
EXACT: Final = (torch.float32, torch.float64)
"""Of shorter ones a CPU rounds the last elements of a tensor in another way than the others."""


class DeferredStep:
    """One step of any torch optimizer, taken for some parameters at a time.

    A torch optimizer keeps its state by parameter and skips parameters that it is not given, so
    that a step over all equals steps over disjoint subsets, with the parameter groups and their
    settings (learning rate, momentum, ...) that held when the step was asked for.

    In slices, what the step makes beside the state (dense means of sparse ones, gradients with
    weight decay, denominators) has the size of a slice and not of the parameters: those of more
    than `slice_elements` elements are updated a slice at a time, each as a parameter of its own on
    the same memory, and of smaller ones as many together. Every element gets what it gets from the
    step of the whole, bit for bit. Optimizers that are not `ELEMENTWISE` take the step for all
    parameters at once, and parameters that are not `EXACT`, or not contiguous, are not cut.

    Args:
        optimizer: asked to step now.
        slice_elements: see above; None: all given parameters are updated together.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, slice_elements: int | None = None) -> None:
        self._optimizer = optimizer
        self._slice = slice_elements if is_elementwise(optimizer) else None
        self._settings: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (group, {key: _frozen(value) for key, value in group.items() if key != "params"})
            for group in optimizer.param_groups
        ]
        self._place = {
            id(parameter): (number, index)
            for number, group in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
        }

    def refuse_changed(self) -> None:
        """Settings must still be those that held when the step was asked for.

        Raises:
            UsageError: names the one that is another now.
        """
        for group, settings in self._settings:
            for key, value in settings.items():
                if not _same(group.get(key), value):
                    raise changed_setting(key, value, group.get(key))

    def take(
        self, parameters: Sequence[torch.nn.Parameter], gradients: Sequence[torch.Tensor]
    ) -> None:
        """Update these parameters with these gradients, and no other parameter.

        Args:
            parameters: some of the optimizer's.
            gradients: of their shapes, or sparse [n].
        """
        together: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        num_elements = 0
        for parameter, gradient in zip(parameters, gradients, strict=True):
            size = self._slice
            if size is not None:
                if num_elements + parameter.numel() > size:
                    self._whole(together)
                    together, num_elements = [], 0
                if parameter.numel() > size and self._can_cut(parameter):
                    self._slice_by_slice(parameter, gradient, size)
                    continue
            num_elements += parameter.numel()
            together.append((parameter, gradient))
        self._whole(together)

    def _can_cut(self, parameter: torch.nn.Parameter) -> bool:
        kept = self._optimizer.state.get(parameter, {}).values()
        alike = [parameter, *(t for t in kept if _is_like(t, parameter))]
        return parameter.dtype in EXACT and all(t.is_contiguous() for t in alike)

    def _whole(self, pairs: Sequence[tuple[torch.nn.Parameter, torch.Tensor]]) -> None:
        if pairs:
            self._step(
                {id(parameter): parameter for parameter, _ in pairs},
                [(p, elements(g, 0, p.numel()).view(p.shape)) for p, g in pairs],
            )

    def _slice_by_slice(
        self, parameter: torch.nn.Parameter, gradient: torch.Tensor, size: int
    ) -> None:
        """Update a parameter by way of parameters that are slices of it."""
        states, flat = self._optimizer.state, parameter.detach().view(-1)
        before = states.get(parameter, {})
        whole = dict(before)
        found: dict[str, Any] = {}
        others: dict[str, Any] = {}  # what is no element's: a count of steps
        for low in range(0, flat.numel(), size):
            high = min(low + size, flat.numel())
            piece = torch.nn.Parameter(flat[low:high], requires_grad=parameter.requires_grad)
            if before:
                states[piece] = {
                    name: kept.view(-1)[low:high] if _is_like(kept, parameter) else _frozen(kept)
                    for name, kept in before.items()
                }
            try:
                self._step({id(parameter): piece}, [(piece, elements(gradient, low, high))])
            finally:
                found = states.pop(piece, {})
            for name, kept in found.items():
                if not _is_like(kept, piece):
                    others[name] = kept
                    continue
                if name not in whole:  # the first step makes the state
                    whole[name] = _beside(kept, parameter)
                mine = whole[name].view(-1)[low:high]
                if mine.data_ptr() != kept.data_ptr():
                    mine.copy_(kept)
        if found:
            states[parameter] = {name: others.get(name, whole.get(name)) for name in found}

    def _step(
        self,
        stand_ins: Mapping[int, torch.nn.Parameter],
        pairs: Sequence[tuple[torch.nn.Parameter, torch.Tensor]],
    ) -> None:
        """One step of the optimizer.

        Args:
            stand_ins: by identity of a parameter that is updated, what takes its place.
            pairs: these, and their gradients.
        """
        groups = self._optimizer.param_groups
        kept = [dict(group) for group in groups]
        own = [parameter.grad for parameter, _ in pairs]
        # In the order of each group. One that was added since then has no part in this step.
        mine: list[list[torch.nn.Parameter]] = [[] for _ in groups]
        known = [(self._place[each], each) for each in stand_ins if each in self._place]
        for (number, _), each in sorted(known):
            mine[number].append(stand_ins[each])
        try:
            for number, group in enumerate(groups):
                settings = self._settings[number][1] if number < len(self._settings) else {}
                group.update(settings, params=mine[number])
            for parameter, gradient in pairs:
                parameter.grad = gradient
            type(self._optimizer).step(self._optimizer)
        finally:
            for group, before in zip(groups, kept, strict=True):
                group.update(before)
            for (parameter, _), before_it in zip(pairs, own, strict=True):
                parameter.grad = before_it


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it updates each element from its own gradient and state alone."""
    return type(optimizer) in ELEMENTWISE and not optimizer.defaults.get("fused")


def _is_like(kept: Any, parameter: torch.Tensor) -> bool:
    """Whether a tensor of the optimizer's state has an element for each of the parameter's."""
    return isinstance(kept, torch.Tensor) and kept.shape == parameter.shape


def _beside(kept: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Memory for a parameter's state where that of one of its slices lies."""
    if is_on_host(kept, parameter.device):
        there = zeros_on_host(parameter.numel(), kept.dtype, parameter.device)
        return there.view(parameter.shape)
    return torch.empty(parameter.shape, dtype=kept.dtype, device=kept.device)


def _frozen(value: Any) -> Any:
    """The setting as it is now: a schedule changes a learning rate that is a tensor in place."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, list | tuple):
        return type(value)(_frozen(item) for item in value)
    return value


def _same(now: Any, before: Any) -> bool:
    if isinstance(now, torch.Tensor) and isinstance(before, torch.Tensor):
        return torch.equal(now, before)
    return bool(now == before)
