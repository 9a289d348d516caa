"""Records the lifetimes of one step on fake tensors: nothing is computed, nothing allocated."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from testbed.memory.host import PAGE_BYTES
from testbed.memory.planning.lifetimes import ForwardOp, GradientReady, Lifetimes, Use, Value
from testbed.memory.recording.calibrate import OperatorSpec
from testbed.memory.recording.storages import (
    LiveStorages,
    View,
    allocated_bytes,
    is_question,
    is_sum_of_gradients,
    tensors_in,
    written,
)

OUTSIDE = "(outside)"
EXCHANGING = frozenset({"c10d", "_c10d_functional", "c10d_functional"})


@dataclass(frozen=True)
class Rates:
    """How fast operators run, for times that nobody has measured.

    Attributes:
        flops_per_s: of convolutions and matrix products.
        bytes_per_s: of all others, read and written.
        op_s: of any operator at least.
    """

    flops_per_s: float = 1e11
    bytes_per_s: float = 1e10
    op_s: float = 1e-5


@dataclass
class _Open:
    """A value while it is recorded."""

    num_bytes: int
    op: int
    output: int
    inputs: tuple[int, ...]
    born: int
    replaces: int | None
    dies: int = -1
    uses: list[_OpenUse] = field(default_factory=list)
    stays: bool = False


@dataclass
class _OpenUse:
    packed: int
    unpacked: int = -1
    released: int = -1


class _Token:
    """Stands for a saved tensor, which is dropped."""

    def __init__(self, recording: Recording, use: _OpenUse, tensor: torch.Tensor) -> None:
        self._recording, self._use = recording, use
        self._view = View.of(tensor)
        self._num_bytes = tensor.untyped_storage().nbytes()
        self._device = tensor.device

    def unpack(self) -> torch.Tensor:
        """Another tensor of this form, in a storage of its own."""
        recording = self._recording
        dtype = self._view.dtype
        with recording.not_counted():
            size = self._num_bytes // dtype.itemsize
            made = self._view.on(torch.empty(size, dtype=dtype, device=self._device))
        recording.sources([made])
        self._use.unpacked = recording.tick()
        recording.layer = recording.layer_at[self._use.packed]
        return made

    def __del__(self) -> None:
        self._use.released = self._recording.tick()


class Recording(TorchDispatchMode):
    """One step, from its first operator to the last gradient.

    Saved tensors are dropped when autograd packs them, and replaced by others when it unpacks
    them, so that a storage's death shows how long anybody but autograd held it.

    Args:
        named: the parameters that are trained.
        rates: times of operators.
    """

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]], rates: Rates) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ignored: set[int] = set()
        self.layer = OUTSIDE
        self.layer_at: dict[int, str] = {}
        self._relus: tuple[str, ...] = ()
        self.storages = LiveStorages(self._on_birth, self._on_death)
        self._named, self._rates = named, rates
        self._units: dict[str, int] = {}
        self._ops: list[ForwardOp] = []
        self._values: list[_Open] = []
        self._value_of: dict[int, int] = {}  # by storage
        self._bytes: dict[int, int] = {}
        self._base: list[int] = []
        self._times: list[float] = []
        self._level = 0
        self._now_s = 0.0
        self._gradients: list[GradientReady] = []
        self._is_forward, self._counts = True, True
        self._fixed_ops: set[int] = set()  # that cannot be run again
        self._readers: dict[int, set[int]] = {}  # of storages that are there before the step
        self._changed: set[int] = set()
        self.calls: list[
            tuple[OperatorSpec, int, float]
        ] = []  # with the position after it, and seconds
        self._layers: list[str] = []

    # Positions

    def tick(self) -> int:
        """An event: its position."""
        self._base.append(self._level)
        self._times.append(self._now_s)
        self._layers.append(self.layer)
        return len(self._base) - 1

    @contextlib.contextmanager
    def not_counted(self) -> Iterator[None]:
        """What is made inside is no part of the step."""
        before, self._counts = self._counts, False
        try:
            yield
        finally:
            self._counts = before

    def sources(self, tensors: Sequence[torch.Tensor]) -> int:
        """These are there before the step and stay; returns their bytes, each storage once."""
        total = 0
        for tensor in tensors:
            if self.storages.find(tensor) is None:
                number = self.storages.see(tensor)
                self.ignored.add(number)
                total += self._bytes.pop(number)
                self._level -= allocated_bytes(tensor.untyped_storage())
        return total

    def _on_birth(self, number: int, storage: torch.UntypedStorage) -> None:
        self._bytes[number] = allocated_bytes(storage)
        self._level += self._bytes[number]

    def _on_death(self, number: int) -> None:
        value = self._value_of.pop(number, None)
        if number in self.ignored:
            return
        if value is not None:
            self._values[value].dies = self.tick()
        else:
            self._level -= self._bytes[number]
            self.tick()

    # Operators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._counts or is_question(func):
            return func(*args, **kwargs)
        given = tensors_in(args, kwargs)
        before = [self.storages.find(t) for t in given]
        self.tick()
        result = func(*args, **kwargs)
        time_s = self._time(func, args, kwargs, result, given)
        self._now_s += time_s
        if self._is_forward:
            self._add_values(func, args, kwargs, result, before, time_s)
        elif is_sum_of_gradients(func, args):
            self.storages.see_sum(result, args)
        else:
            self.storages.see_all(tensors_in(result))
        self.calls.append((OperatorSpec(func, args, kwargs), self.tick(), time_s))
        return result

    def _add_values(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        before: list[int | None],
        time_s: float,
    ) -> None:
        op = len(self._ops)
        unit = self._units.setdefault(self.layer, len(self._units))
        self._ops.append(ForwardOp(name=str(func), unit=unit, time_s=time_s))
        inputs = tuple(sorted({self._value_of[n] for n in before if n in self._value_of}))
        overwritten = {self.storages.find(t) for t in written(func, args, kwargs)}
        self._note_sources(op, func, before, overwritten)
        for output, tensor in enumerate(tensors_in(result)):
            number = self.storages.see(tensor)
            replaced = None
            if number in before:
                replaced = self._value_of.get(number)
                if number not in overwritten or replaced is None:
                    continue  # a view, or something that is there before the step
                self._values[replaced].dies = self.tick()
                if self._values[replaced].uses:  # another part of the storage is overwritten
                    self._fixed_ops.add(op)  # again, it would change what is in use
            elif number in self._value_of:
                continue  # another output in the same storage
            else:
                self._level -= self._bytes[number]
            self._value_of[number] = len(self._values)
            self._values.append(
                _Open(
                    num_bytes=self._bytes[number],
                    op=op,
                    output=output,
                    inputs=inputs,
                    born=self.tick(),
                    replaces=replaced,
                )
            )

        for hidden_in in overwritten - {self.storages.find(t) for t in tensors_in(result)}:
            if hidden_in in self._value_of:  # the noise of RReLU, which is saved before it is drawn
                hidden = self._values[self._value_of[hidden_in]]
                hidden.stays = True
                self._fixed_ops |= {op, hidden.op}

    def _note_sources(
        self, op: int, func: Any, before: list[int | None], overwritten: set[int | None]
    ) -> None:
        """What reads buffers that the forward pass changes cannot be run again, nor exchanges."""
        if func.namespace in EXCHANGING:
            self._fixed_ops.add(op)
        there = {n for n in before if n is not None and n not in self._value_of}
        for number in there:
            self._readers.setdefault(number, set()).add(op)
        self._changed |= there & overwritten

    def _time(
        self, func: Any, args: Any, kwargs: Any, result: Any, given: list[torch.Tensor]
    ) -> float:
        rates = self._rates
        made = tensors_in(result)
        moved = sum(t.numel() * t.element_size() for t in (*given, *made))
        if func.is_view:
            return 0.0
        count = flop_registry.get(func._overloadpacket)
        flops = 0 if count is None else count(*args, **kwargs, out_val=result)
        return max(flops / rates.flops_per_s, moved / rates.bytes_per_s, rates.op_s)

    # Layers

    @contextlib.contextmanager
    def watching_layers(self, model: torch.nn.Module) -> Iterator[None]:
        """Know which layer of the model runs."""
        names = {id(module): name or "(model)" for name, module in model.named_modules()}
        relus = (m for m in model.modules() if isinstance(m, torch.nn.ReLU))
        self._relus = tuple(names[id(module)] for module in relus)
        stack: list[str] = []

        def enter(module: torch.nn.Module, inputs: Any) -> None:
            if id(module) in names:
                stack.append(self.layer)
                self.layer = names[id(module)]

        def leave(module: torch.nn.Module, inputs: Any, result: Any) -> None:
            if id(module) in names and stack:
                self.layer = stack.pop()

        handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    # Autograd

    def pack(self, tensor: torch.Tensor) -> Any:
        """A tensor is saved."""
        number = self.storages.find(tensor)
        value = None if number is None else self._value_of.get(number)
        if value is None:
            return tensor
        use = _OpenUse(self.tick())
        self.layer_at[use.packed] = self.layer
        self._values[value].uses.append(use)
        return _Token(self, use, tensor)

    def unpack(self, saved: Any) -> torch.Tensor:
        """A saved tensor is used."""
        return saved.unpack() if isinstance(saved, _Token) else saved

    def gradient_ready(self, name: str, parameter: torch.Tensor) -> None:
        """A parameter's gradient is final; it is dropped."""
        gradient = parameter.grad
        assert gradient is not None
        number = self.storages.see(gradient)
        if number not in self.ignored:
            self.ignored.add(number)
            self._level -= self._bytes[number]
        self._gradients.append(
            GradientReady(
                name=name,
                num_bytes=allocated_bytes(gradient.untyped_storage()),
                position=self.tick(),
            )
        )
        parameter.grad = None

    def run(self, model: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> None:
        """Forward and backward pass."""
        handles = [
            p.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda parameter, name=name: self.gradient_ready(name, parameter)
            )
            for name, p in self._named
        ]
        try:
            with self:
                with (
                    self.watching_layers(model),
                    torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack),
                ):
                    value = loss()
                self._is_forward, self.layer = False, OUTSIDE
                value.backward()  # type: ignore[no-untyped-call]
                del value
        finally:
            for handle in handles:
                handle.remove()
        self.tick()

    def lifetimes(self, weight_bytes: int, sample_bytes: int) -> Lifetimes:
        """What was recorded."""
        last = self.tick()
        fixed = self._fixed_ops.union(*(self._readers[number] for number in self._changed))
        values = tuple(
            Value(
                num_bytes=v.num_bytes,
                op=v.op,
                output=v.output,
                inputs=v.inputs,
                born=v.born,
                dies=last if v.dies < 0 else v.dies,
                uses=tuple(
                    Use(
                        packed=use.packed,
                        unpacked=use.unpacked,
                        released=last if use.released < 0 else use.released,
                    )
                    for use in v.uses
                ),
                replaces=v.replaces,
                is_fixed=v.op in fixed,
                stays=v.stays,
            )
            for v in self._values
        )
        return Lifetimes(
            units=tuple(self._units),
            ops=tuple(self._ops),
            values=values,
            base=tuple(self._base),
            time_s=tuple(self._times),
            gradients=tuple(self._gradients),
            layers=tuple(self._layers),
            relus=self._relus,
            weight_bytes=weight_bytes,
            sample_bytes=sample_bytes,
            least_moved_bytes=PAGE_BYTES,
        )
