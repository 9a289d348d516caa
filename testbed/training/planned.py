"""A model whose forward passes are carried out by memory plans, made when shapes are first seen."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable
from typing import Any, Final

import msgspec
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from testbed.base.errors import UsageError
from testbed.control.protocol import Control, decided_by_first
from testbed.memory.planning.plan import MemoryPlan
from testbed.memory.recording.calibrate import moving_costs
from testbed.memory.recording.record import record
from testbed.memory.recording.storages import tensors_in
from testbed.memory.running.engine import ActivationEngine
from testbed.memory.running.script import overwriting
from testbed.memory.running.transfers import Transfers
from testbed.memory.strategy import Limits, Strategy
from testbed.training.exchange.setup import AGREE_S
from testbed.training.forecast import chosen
from testbed.training.session import Session

MOST_PLANS: Final = 256  # that are kept; shapes may be without number


COMPILED: Final = (
    "{} is compiled, and a memory strategy for activations acts on operators one by one, which a "
    "compiled forward pass does not show; leave torch.compile out, or use a memory strategy for "
    "gradients alone, as release"
)


def refuse_compiled(model: torch.nn.Module) -> None:
    """Raise UsageError where modules are compiled, or have functions that are.

    Args:
        model: that a memory strategy is for.
    """
    for name, module in model.named_modules():
        held = [value for own in (module, *type(module).__mro__) for value in vars(own).values()]
        if module._compiled_call_impl is not None or any(map(_is_compiled, held)):
            raise UsageError(COMPILED.format(f"{type(module).__name__} {name or '(the model)'}"))


def _is_compiled(held: Any) -> bool:
    """Whether it is a function that `torch.compile` has made."""
    if not isinstance(held, types.FunctionType | types.MethodType):
        return False
    known = "_torchdynamo_orig_callable"
    return hasattr(held, known) and not getattr(held, "_torchdynamo_disable", False)


class _Forward:
    """Stands for a model's forward pass; a copy of the model, or what it is saved as, has its own.

    Args:
        model: whose forward pass it is.
        own: what the model had in this place, if that was not of its class.
        call: told whether it is compiled, and the arguments.
    """

    def __init__(self, model: torch.nn.Module, own: Any, call: Callable[..., Any]) -> None:
        functools.update_wrapper(self, model.forward)
        self._model, self._own, self._plans = model, own, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._plans(torch.compiler.is_compiling(), args, kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if self._own is None:
            return getattr, (self._model, "forward")
        return _same, (self._own,)


def _same(held: Any) -> Any:
    return held


class PlannedModel:
    """Surrounds a model's forward passes in training, where a gradient is wanted.

    The first call with inputs of new shapes runs the model's forward pass once more on tensors
    without values, and a plan is made from what it would take; nothing is computed by that, and
    attributes of the model's modules are what they were before, but what the forward pass does
    elsewhere (printing, counting in another object) happens once more. For the very first call rank
    0 decides for all ranks whose inputs have the same shapes.

    Args:
        model: its `forward` is replaced until `close`.
        optimizer: of its parameters.
        session: that trains it.
        control: the job's control plane.
        strategy: that chooses.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        session: Session,
        control: Control,
        strategy: Strategy,
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._session, self._control, self._strategy = session, control, strategy
        self._engines: dict[Hashable, ActivationEngine] = {}  # what was used last comes last
        self._transfers = Transfers(strategy.to)
        self._is_planning = False
        self._own = vars(model).get("forward")
        self._forward = model.forward
        refuse_compiled(model)
        call: Any = torch.compiler.disable(self._call)  # type: ignore[no-untyped-call]
        model.forward = _Forward(model, self._own, call)

    @property
    def plans(self) -> list[MemoryPlan]:
        """Those that were used last, the newest at the end."""
        return [engine.plan for engine in self._engines.values()]

    @property
    def held_bytes(self) -> int:
        """Of memory outside the device, for activations of all shapes."""
        return self._transfers.held_bytes

    def close(self) -> None:
        """Give the model its own forward pass back; ends threads."""
        if self._own is None:
            vars(self._model).pop("forward", None)
        else:
            self._model.forward = self._own
        self._transfers.close()

    def _call(self, is_compiled: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_compiled:
            raise UsageError(COMPILED.format("the model, or what calls it,"))
        wanted = self._model.training and torch.is_grad_enabled() and not self._is_planning
        if not wanted:
            return self._forward(*args, **kwargs)
        leaves, _ = tree_flatten((args, kwargs))
        shapes = tuple(map(_shape_of, leaves))
        engine = self._engines.pop(shapes, None)
        if engine is None:
            refuse_compiled(self._model)
            plan = self._plan(shapes, args, kwargs)
            engine = ActivationEngine(plan, transfers=self._transfers)
        self._engines[shapes] = engine
        if len(self._engines) > MOST_PLANS:
            del self._engines[next(iter(self._engines))]
        with overwriting(self._model, engine.plan.in_place), engine.forward():
            return self._forward(*args, **kwargs)

    def _plan(self, shapes: tuple[Hashable, ...], args: Any, kwargs: Any) -> MemoryPlan:
        if self._engines or self._session.backend.size == 1:
            return self._own_plan(args, kwargs)
        # Every rank begins with a forward pass. Later ones may see other shapes than others do.
        key = repr(shapes).encode()

        def decide() -> bytes:
            return msgspec.msgpack.encode((key, self._own_plan(args, kwargs)))

        shared = decided_by_first(
            self._control, "memory plan", decide, AGREE_S, self._session.backend.size
        )
        first_key, first = msgspec.msgpack.decode(shared, type=tuple[bytes, MemoryPlan])
        return first if first_key == key else self._own_plan(args, kwargs)

    def _own_plan(self, args: Any, kwargs: Any) -> MemoryPlan:
        self._session.flush()  # updates that are pending belong to real tensors
        leaves, tree = tree_flatten((args, kwargs))
        given = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))

        def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
            tensors = iter(batch)
            both = [next(tensors) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            again, more = tree_unflatten(both, tree)
            outputs = tensors_in(model(*again, **more))  # the script may keep them all
            made = [output for output in outputs if output.requires_grad]
            if not made:
                raise UsageError(
                    "a memory strategy for activations was given, and no output of the model's "
                    "forward pass depends on a parameter that is trained; call the model itself, "
                    "or use memory=none"
                )
            return torch.stack([t.sum().float() for t in made]).sum()

        self._is_planning = True
        try:
            lifetimes = record(self._model, loss, given, self._optimizer)
        finally:
            self._is_planning = False
        release = self._strategy.release
        costs = msgspec.structs.replace(
            moving_costs(next(self._model.parameters()).device),
            in_flight=None if release is None else release.in_flight,
        )
        held_bytes = sum(tensor.nbytes for tensor in self._session.held_tensors())
        return chosen(self._strategy, lifetimes, Limits(None, costs, held_bytes))


def _shape_of(leaf: Any) -> Hashable:
    """What a plan depends on of an argument."""
    if isinstance(leaf, torch.Tensor):
        return (tuple(leaf.shape), str(leaf.dtype), leaf.device.type, leaf.requires_grad)
    return leaf if isinstance(leaf, bool | int | float | str | None) else type(leaf).__name__
