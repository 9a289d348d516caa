"""Which layers read which layers' outputs: the branches of a model, from its traced graph."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

# The graph of operations of a model, in one form for torch.fx and torch.export.

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


Consumers = tuple[tuple[int, ...], ...]
_NOTHING: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Dag:
    """A model's consumers and where they come from.

    Attributes:
        consumers: for each tensor the indices of tensors whose layer reads its layer's output;
            None = take the layers for a chain.
        source: `torch.fx`, `torch.export` or `chain`.
        reason: why nothing better was possible; empty where the first tool could do it.
    """

    consumers: Consumers | None
    source: str
    reason: str = ""


def consumers_of(
    model: nn.Module,
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any],
    names: Sequence[str],
) -> Dag:
    """Trace the model with torch.fx, else torch.export, else take it for a chain and say why.

    Args:
        model: in the mode in which it trains.
        arguments: of a call of the model.
        keywords: of the same call.
        names: of its tensors, in the order of the result.

    Example:
        >>> import torch
        >>> chain = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2))
        >>> consumers_of(chain, (torch.ones(1, 2),), {}, ["0.weight", "2.weight", "2.bias"])
        Dag(consumers=((1, 2), (), ()), source='torch.fx', reason='')
    """
    reasons: list[str] = []
    for source, trace in (("torch.fx", symbolic_graph), ("torch.export", exported_graph)):
        try:
            graph = trace(model, arguments, keywords)
        except Exception as error:  # a model may raise anything when it meets a placeholder
            words = str(error).strip().splitlines() or [""]
            reasons.append(f"{source}: {type(error).__name__}: {words[0]}")
            continue
        consumers = consumers_in(graph, names)
        if any(consumers) or len(names) < 2:
            return Dag(consumers, source, "; ".join(reasons))
        reasons.append(f"{source}: no layer reads another's output")
    return Dag(None, "chain", "; ".join(reasons))


def consumers_in(graph: Sequence[Operation], names: Sequence[str]) -> Consumers:
    """The consumers of each tensor; operations without new parameters are passed through.

    A layer is an operation on data that brings in parameters which none before it did; one that
    runs again, or whose weight is tied to an earlier one's, is passed through like an activation.
    Edges so point from earlier to later first runs and cannot form a cycle.

    Args:
        graph: operations in execution order.
        names: of the tensors; parameters that are not among them are ignored.

    Example:
        >>> x, a = Operation((), (), True), Operation((0,), ("a",))
        >>> relu, b = Operation((1,)), Operation((2,), ("b",))
        >>> add, c = Operation((2, 3)), Operation((4,), ("c",))
        >>> consumers_in([x, a, relu, b, add, c], ["a", "b", "c"])
        ((1, 2), (2,), ())
    """
    index_of = {name: index for index, name in enumerate(names)}
    placed: set[int] = set()
    # Per operation: whether it depends on data, the tensors of the layers whose output reaches it,
    # and the tensors that it carries on their way to a layer.
    is_data: list[bool] = []
    reached: list[frozenset[int]] = []
    carried: list[frozenset[int]] = []
    readers: list[set[int]] = [set() for _ in names]
    for operation in graph:
        inputs = operation.inputs
        data = operation.is_data or any(is_data[i] for i in inputs)
        sources = _NOTHING.union(*(reached[i] for i in inputs))
        brought = frozenset(index_of[n] for n in operation.parameters if n in index_of)
        brought = brought.union(*(carried[i] for i in inputs))
        new = brought - placed if data else _NOTHING
        for source in sources if new else ():
            readers[source] |= new
        placed |= new
        is_data.append(data)
        reached.append(new or sources)
        carried.append(_NOTHING if data else brought)
    return tuple(tuple(sorted(r)) for r in readers)
