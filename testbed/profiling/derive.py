"""Traces of models whose total times were published, shared out by operation counts.

Nothing is computed: the model runs on torch's meta device, where tensors have shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from testbed.base.trace import Trace, TraceTensor
from testbed.profiling.dag import consumers_of
from testbed.profiling.overhead import Step
from testbed.profiling.survey import Survey, survey_step

NORM_OPERATIONS: Final = 8  # per value: mean, variance, scaling, shifting, each read and written
EMBEDDING_OPERATIONS: Final = 1  # per value that is looked up
_NORMS: Final = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)

Loss = Callable[[Any], torch.Tensor]


def derive_trace(
    model: nn.Module,
    arguments: tuple[torch.Tensor, ...],
    *,
    name: str,
    device: str,
    batch_size: int,
    forward_s: float,
    backward_s: float,
    source: str,
    loss: Loss = torch.sum,
) -> Trace:
    """A trace whose totals were published, shared out over the tensors by their operations.

        t_f(l) = t_f cost(l) / sum(cost),   t_b(l) = t_b cost(l) / sum(cost)

    The cost of a weight is the multiplications of its layer for one batch (convolutions, matrix
    products); 8 operations for each value that a normalisation puts out, 1 for each value that an
    embedding looks up. What needs no parameters of its own (attention) counts for the last layer
    before it. Biases come with their weights and cost nothing.

    Args:
        model: on the meta device; its weights need no values.
        arguments: of one call of the model, a whole batch.
        name: of the trace.
        device: where the totals were measured.
        batch_size: of that measurement.
        forward_s: of the whole model.
        backward_s: of the whole model.
        source: where the totals come from, in words; kept in the file.
        loss: of the model's output; only which parameters it reaches matters.

    Example:
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 2))
        ...     batch = torch.empty(4, 2)
        >>> trace = derive_trace(model, (batch,), name="toy", device="none", batch_size=4,
        ...                      forward_s=1.0, backward_s=2.0, source="made up")
        >>> [(t.name, t.num_elements, t.backward_s) for t in trace.tensors]
        [('0.weight', 6, 1.0), ('1.weight', 6, 1.0), ('1.bias', 2, 0.0)]
    """
    survey = survey_step(model, Step(lambda: loss(model(*arguments))))
    costs = _costs(model, arguments, survey)
    total = sum(costs)
    dag = consumers_of(model, arguments, {}, survey.names)
    tensors = tuple(
        TraceTensor(
            name=tensor,
            num_elements=parameter.numel(),
            forward_s=cost / total * forward_s,
            backward_s=cost / total * backward_s,
        )
        for tensor, parameter, cost in zip(survey.names, survey.parameters, costs, strict=True)
    )
    return Trace(
        name=name,
        device=f"{device} (derived)",
        batch_size=batch_size,
        tensors=tensors,
        consumers=dag.consumers,
        extra={"origin": "derived", "source": source, "dag": dag.source},
    )


def _costs(model: nn.Module, arguments: tuple[torch.Tensor, ...], survey: Survey) -> list[int]:
    """Operations of one forward pass for which each tensor stands, in the survey's order."""
    runs: list[str] = []
    operations: dict[str, int] = {}
    path_of = {module: path for path, module in model.named_modules()}
    owners = {path_of[layer.module]: layer.tensors[0] for layer in survey.layers}
    with ExitStack() as hooks:
        for path, module in model.named_modules():
            hook = module.register_forward_hook(partial(_after, runs, operations, path))
            hooks.callback(hook.remove)
        counter = hooks.enter_context(FlopCounterMode(display=False))
        model(*arguments)
    products = _own_products(counter.get_flop_counts(), type(model).__name__)
    for path, count in products.items():
        operations[path] = operations.get(path, 0) + count
    costs = [0] * len(survey.names)
    for path, count in operations.items():
        costs[owners[_payer(path, runs, owners)]] += count
    return costs


def _after(
    runs: list[str], operations: dict[str, int], path: str, module: nn.Module, _: Any, output: Any
) -> None:
    runs.append(path)
    if isinstance(module, _NORMS):
        operations[path] = operations.get(path, 0) + NORM_OPERATIONS * output.numel()
    elif isinstance(module, nn.Embedding):
        operations[path] = operations.get(path, 0) + EMBEDDING_OPERATIONS * output.numel()


def _own_products(counts: Mapping[str, Mapping[Any, int]], root: str) -> dict[str, int]:
    """Multiplications that each module does itself, without those of its children."""
    totals = {
        path.removeprefix(root).removeprefix("."): sum(by_kind.values()) // 2
        for path, by_kind in counts.items()
        if path.split(".")[0] == root
    }
    own = dict(totals)
    for path, count in totals.items():
        if path:
            parent = path.rpartition(".")[0]
            while parent and parent not in own:
                parent = parent.rpartition(".")[0]
            own[parent] -= count
    return {path: count for path, count in own.items() if count}


def _payer(path: str, runs: Sequence[str], owners: Mapping[str, int]) -> str:
    """The module itself if tensors are its own, else the last one of its inside that has some."""
    if path in owners:
        return path
    inside = [run for run in runs if run in owners and run.startswith(f"{path}.")]
    return inside[-1]
