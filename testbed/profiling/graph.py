"""A model's graph of operations in one plain form, whichever tool traced it."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

# torch.fx patches classes while it traces: ranks that are threads of one process take turns.
TRACING = threading.Lock()


@dataclass(frozen=True)
class Operation:
    """One node of a traced graph, in execution order.

    Attributes:
        inputs: positions of the operations whose results it reads.
        parameters: names of the parameters that it brings in.
        is_data: it depends on what the model is given even if none of its inputs does.
    """

    inputs: tuple[int, ...]
    parameters: tuple[str, ...] = ()
    is_data: bool = False


def symbolic_graph(
    model: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> list[Operation]:
    """The graph as torch.fx traces it with placeholders; fails on control flow over values.

    Arguments that are no tensors, and those left to their defaults, are constants of the graph.
    """
    bound = inspect.signature(model.forward).bind(*arguments, **keywords)
    bound.apply_defaults()
    constants = {k: v for k, v in bound.arguments.items() if not isinstance(v, torch.Tensor)}
    with TRACING:
        traced = fx.symbolic_trace(model, concrete_args=constants or None)
    names = _names(model)

    def brought(node: fx.Node) -> Operation:
        target = str(node.target)
        if node.op == "call_module":
            module = traced.get_submodule(target)
            found = tuple(names[id(p)] for p in module.parameters() if id(p) in names)
            return Operation((), found, is_data=True)
        if node.op == "get_attr":
            value = _attribute(traced, target)
            return Operation((), (names[id(value)],) if id(value) in names else ())
        return Operation((), is_data=node.op == "placeholder")

    return _operations(traced.graph, brought)


def exported_graph(
    model: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> list[Operation]:
    """The graph as torch.export records it for these very arguments."""
    program = torch.export.export(model, arguments, dict(keywords), strict=False)
    parameters = program.graph_signature.inputs_to_parameters
    given = set(program.graph_signature.user_inputs)
    names = _names(model)

    def brought(node: fx.Node) -> Operation:
        if node.op != "placeholder":
            return Operation(())
        if node.name in parameters:
            parameter = model.get_parameter(parameters[node.name])
            return Operation((), (names[id(parameter)],) if id(parameter) in names else ())
        return Operation((), is_data=node.name in given)

    return _operations(program.graph, brought)


def _names(model: nn.Module) -> dict[int, str]:
    """The one name of each trained parameter; tied weights have the first of theirs."""
    return {id(p): name for name, p in model.named_parameters() if p.requires_grad}


def _attribute(module: nn.Module, target: str) -> Any:
    value: Any = module
    for word in target.split("."):
        value = getattr(value, word)
    return value


def _operations(graph: fx.Graph, brought: Any) -> list[Operation]:
    position: dict[fx.Node, int] = {}
    found: list[Operation] = []
    for node in graph.nodes:
        inputs = tuple(position[n] for n in node.all_input_nodes)
        bare: Operation = brought(node)
        position[node] = len(found)
        found.append(Operation(inputs, bare.parameters, bare.is_data))
    return found
