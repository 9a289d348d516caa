"""One untimed step that shows the order of the layers, their output sizes and the model's input.

Forward order: tensors stand where the layer that owns them first runs; a tied weight where the
first of its layers runs, once (a leaf counts before a module around it). A tensor whose layer is
never called as such (a weight that another layer reads) stands behind the layer whose gradient
comes next after its own. Tensors that get no gradient stand last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn

from testbed.base.errors import UsageError
from testbed.profiling.overhead import Step


@dataclass(frozen=True)
class Layer:
    """A module that owns tensors which no layer before it owns.

    Attributes:
        module: it; its first call in a step begins its time.
        tensors: indices of its tensors, in forward order.
    """

    module: nn.Module
    tensors: tuple[int, ...]


@dataclass(frozen=True)
class Survey:
    """The layers of a model in the order of one step.

    Attributes:
        names: of the tensors, in forward order.
        parameters: the tensors.
        layers: in the order in which they first run.
        activation_bytes: name of each leaf module -> bytes of its outputs in one step.
        arguments: of the model's first call; None if the loss never called the model as a whole.
    """

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    layers: tuple[Layer, ...]
    activation_bytes: dict[str, int]
    arguments: tuple[tuple[Any, ...], dict[str, Any]] | None


@dataclass
class _Seen:
    runs: list[nn.Module] = field(default_factory=list)
    known: set[nn.Module] = field(default_factory=set)
    ready: list[int] = field(default_factory=list)
    activation_bytes: dict[str, int] = field(default_factory=dict)
    arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None


def survey_step(model: nn.Module, step: Step) -> Survey:
    """Run the step once under hooks.

    Raises:
        UsageError: the step gave no parameter a gradient.
    """
    seen = _Seen()
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    with ExitStack() as hooks:
        _watch(model, named, seen, hooks)
        step()
    if not seen.ready:
        raise UsageError(
            "the step gave no parameter of the model a gradient; expected a loss that depends on "
            "parameters with requires_grad"
        )
    places = _places(named, seen)
    order = sorted(range(len(named)), key=lambda i: places[i])
    return Survey(
        tuple(named[i][0] for i in order),
        tuple(named[i][1] for i in order),
        _layers([places[i] for i in order], seen.runs),
        seen.activation_bytes,
        seen.arguments,
    )


def _watch(
    model: nn.Module, named: Sequence[tuple[str, nn.Parameter]], seen: _Seen, hooks: ExitStack
) -> None:
    def begin(module: nn.Module, arguments: Any) -> None:
        if module not in seen.known:
            seen.known.add(module)
            seen.runs.append(module)

    def end(name: str, module: nn.Module, arguments: Any, output: Any) -> None:
        before = seen.activation_bytes.get(name, 0)
        seen.activation_bytes[name] = before + tensor_bytes(output)

    def begin_model(module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
        if seen.arguments is None:
            seen.arguments = (arguments, keywords)

    def ready(index: int, parameter: torch.Tensor) -> None:
        if index in seen.ready:
            seen.ready.remove(index)  # the last accumulation counts
        seen.ready.append(index)

    root = model.register_forward_pre_hook(begin_model, with_kwargs=True)
    hooks.callback(root.remove)
    for name, module in model.named_modules():
        hooks.callback(module.register_forward_pre_hook(begin).remove)
        if next(module.children(), None) is None:
            hooks.callback(module.register_forward_hook(partial(end, name)).remove)
    for index, (_, parameter) in enumerate(named):
        hook: Any = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            partial(ready, index)
        )
        hooks.callback(hook.remove)


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors in nested tuples, lists and mappings."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(tensor_bytes(v) for v in value.values())
    if isinstance(value, (tuple, list)):
        return sum(tensor_bytes(v) for v in value)
    return 0


# Where a tensor stands: number of the run that it belongs to, whether it belongs there only by the
# order of gradients, and its number among its like.
_Place = tuple[float, int, int]


def _places(named: Sequence[tuple[str, nn.Parameter]], seen: _Seen) -> list[_Place]:
    run_of = {module: number for number, module in enumerate(seen.runs)}
    first_run: dict[int, int] = {}
    # A module with children runs before them and may read its own parameters after them: where a
    # leaf has the same parameter, the leaf's run counts.
    is_leaf = {m: next(m.children(), None) is None for m in seen.runs}
    for module in sorted(seen.runs, key=lambda m: (not is_leaf[m], run_of[m])):
        for parameter in module.parameters(recurse=False):
            first_run.setdefault(id(parameter), run_of[module])
    places: list[_Place] = [(float("inf"), 0, index) for index in range(len(named))]
    run = -1  # what is ready last and has no run stands before all layers
    for number, index in enumerate(reversed(seen.ready)):
        own = first_run.get(id(named[index][1]))
        run = run if own is None else own
        places[index] = (run, 0, index) if own is not None else (run, 1, number)
    return places


def _layers(places: Sequence[_Place], runs: Sequence[nn.Module]) -> tuple[Layer, ...]:
    tensors: dict[int, list[int]] = {}
    for index, (run, borrowed, _) in enumerate(places):
        if not borrowed and run != float("inf"):
            tensors.setdefault(int(run), []).append(index)
    return tuple(Layer(runs[run], tuple(found)) for run, found in sorted(tensors.items()))


# From moments of many repeats to the time of each tensor, so that sums are the measured totals.
#
# All moments of one repeat count from the start of its half-step, medians are taken of moments,
# and times are differences of medians: nothing is lost or counted twice. Moments of a repeat are
# made non-decreasing first, and medians keep an order that holds in every repeat, so no time is
# negative.


def forward_shares_s(begins_s: ArrayLike, totals_s: ArrayLike) -> NDArray[np.float64]:
    """Time of each layer: from its first start to the first start of the next new layer.

    Work without tensors of its own (activations, pooling, a layer that runs again) so counts for
    the layer before it: nothing in it waits for parameters that are not there already. The last
    layer's time holds the loss, the first layer's also what ran before it.

    Args:
        begins_s: [repeats, layers], NaN where a layer did not run in a repeat.
        totals_s: [repeats], of forward and loss.

    Returns:
        [layers] seconds, their sum the median total.

    Example:
        >>> forward_shares_s([[1.0, 3.0]], [7.0]).tolist()
        [3.0, 4.0]
    """
    moments = _median_moments(np.asarray(begins_s, dtype=float), totals_s)
    moments[0] = 0.0
    shares: NDArray[np.float64] = np.diff(moments)
    return shares


def backward_times_s(ready_s: ArrayLike, totals_s: ArrayLike) -> NDArray[np.float64]:
    """Time of each tensor: from the readiness of the one behind it in forward order to its own.

    A tensor counts as ready when all those behind it are, R_l = max over k >= l of its own R_k:
    where a gradient overtakes those behind it, its time is 0. The first tensor's time holds what
    the backward pass did after the last gradient.

    Args:
        ready_s: [repeats, tensors] in forward order, NaN where no gradient came.
        totals_s: [repeats], of the backward pass.

    Returns:
        [tensors] seconds, their sum the median total.

    Example:
        >>> backward_times_s([[5.0, 3.0, 4.0]], [7.0]).tolist()
        [3.0, 0.0, 4.0]
    """
    backwards = np.asarray(ready_s, dtype=float)[:, ::-1]
    moments = _median_moments(backwards, totals_s)
    ends = np.append(moments[:-2], moments[-1])
    return np.diff(ends, prepend=0.0)[::-1]


def _median_moments(moments_s: NDArray[np.float64], totals_s: ArrayLike) -> NDArray[np.float64]:
    """[columns + 1]: medians of the non-decreasing moments and of the total behind them."""
    ends = np.asarray(totals_s, dtype=float)[:, None]
    known = np.fmax(np.fmax.accumulate(moments_s, axis=1), 0.0)
    result: NDArray[np.float64] = np.median(np.hstack([np.fmin(known, ends), ends]), axis=0)
    return result


def spread(shares_s: Sequence[float], owners: Sequence[Sequence[int]], count: int) -> list[float]:
    """A layer's time goes to the first of its tensors, the others have none.

    Example:
        >>> spread([3.0, 4.0], [(0, 1), (2,)], 4)
        [3.0, 0.0, 4.0, 0.0]
    """
    times = [0.0] * count
    for share, tensors in zip(shares_s, owners, strict=True):
        times[tensors[0]] = float(share)
    return times
