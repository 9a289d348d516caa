"""Carries out a memory plan: keeps, moves or makes again what autograd saves."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from testbed.base.errors import RunFailed
from testbed.memory.planning.lifetimes import KEEP, OFFLOAD_SYNC, OFFLOAD_WINDOW, RECOMPUTE
from testbed.memory.planning.plan import MemoryPlan
from testbed.memory.recording.storages import View, Writes, is_question, tensors_in, written
from testbed.memory.running.again import Call, Value
from testbed.memory.running.script import Expected, Script
from testbed.memory.running.transfers import Copy, Transfers
from testbed.memory.strategy import To


class _Kept:
    """A tensor that autograd has saved and that stays; it must not be changed until its use."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()  # an operator's own result would hold itself
        self._version = self._tensor._version

    def get(self) -> torch.Tensor:
        if self._tensor._version != self._version:
            raise RunFailed(
                f"a tensor {list(self._tensor.shape)} that the backward pass needs has been "
                "changed in place since the forward pass; expected it to be left alone, as "
                "PyTorch expects without any memory strategy, too"
            )
        return self._tensor


class _Saved:
    """Stands for a tensor that autograd has saved and that is moved or made again."""

    def __init__(self, value: Value, view: View, forward: _Forward) -> None:
        self.value, self.view, self.forward = value, view, forward
        value.uses += 1

    def __del__(self) -> None:
        self.value.uses -= 1
        if self.value.uses == 0 and self.value.call is not None:
            self.value.there = None  # it can be made again, should another value need it


class _Forward(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """One forward pass and what was saved in it."""

    def __init__(self, plan: MemoryPlan, script: Script, transfers: Transfers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._plan, self._transfers = plan, transfers
        self._expected = Expected(script)
        self._writes = Writes()
        self._count = 0
        self.is_aside = False  # operators of ours, not the model's
        self._live: dict[int, tuple[Value, weakref.ref[torch.UntypedStorage]]] = {}
        self._ahead: weakref.WeakValueDictionary[int, Value] = weakref.WeakValueDictionary()
        self._place = {number: place for place, number in enumerate(plan.fetch_order)}
        self._leaving: list[tuple[Copy, torch.Tensor]] = []

    # Forward

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_aside or is_question(func) or func.is_view:
            return func(*args, **kwargs)
        name = str(func)
        again = name in self._expected.made_again
        self._count += 1
        call = None
        if again:
            call = Call(func, args, kwargs, self._find, self._writes, self._count)
        result = func(*args, **kwargs)
        changed = written(func, args, kwargs)
        self._forget(changed)
        outputs = tensors_in(result)
        for output, number, action in self._expected.match(name, outputs):
            if action != KEEP:
                value = Value(number, call if action == RECOMPUTE else None, output)
                self._add(value, outputs[output])
        return result

    def _add(self, value: Value, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, live = storage._cdata, self._live

        def died(_: object) -> None:
            if key in live and live[key][0] is value:
                del live[key]

        live[key] = (value, weakref.ref(storage, died))

    def _find(self, tensor: torch.Tensor) -> Value | None:
        storage = tensor.untyped_storage()
        entry = self._live.get(storage._cdata)
        return entry[0] if entry is not None and entry[1]() is storage else None

    def _forget(self, changed: list[torch.Tensor]) -> None:
        """What is overwritten is another value from now on."""
        for tensor in changed:
            self._writes.add(tensor)
            self._live.pop(tensor.untyped_storage()._cdata, None)

    def pack(self, tensor: torch.Tensor) -> _Kept | _Saved:
        """Autograd saves a tensor."""
        value = self._find(tensor)
        if value is None:
            return _Kept(tensor)
        if value.call is None and value.copy is None:
            self._send(value, tensor)
        return _Saved(value, View.of(tensor), self)

    def end(self) -> None:
        """The forward pass has ended: nothing is saved any more."""
        self._live.clear()
        self._expected.check()

    # The host

    def _send(self, value: Value, tensor: torch.Tensor) -> None:
        while len(self._leaving) >= OFFLOAD_WINDOW:
            self._gone()
        self.is_aside = True
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        flat.set_(tensor.untyped_storage())
        value.copy = self._transfers.copy(flat)
        self.is_aside = False
        self._leaving.append((value.copy, flat))
        if self._plan.actions[value.number] == OFFLOAD_SYNC:
            while self._leaving:
                self._gone()
        else:
            self._ahead[value.number] = value

    def _gone(self) -> None:
        self._leaving.pop(0)[0].wait()

    def _fetch(self, value: Value) -> torch.Tensor:
        """Back from the host, and those that are wanted next on their way."""
        held = self._begin_fetch(value)
        assert value.copy is not None
        value.copy.wait()
        place = self._place.get(value.number, len(self._place))
        for number in self._plan.fetch_order[place + 1 : place + 1 + OFFLOAD_WINDOW]:
            following = self._ahead.get(number)
            if following is not None:
                self._begin_fetch(following)
        return held

    def _begin_fetch(self, value: Value) -> torch.Tensor:
        if value.there is None:
            assert value.copy is not None
            value.there = value.copy.read()
        return value.there

    # Backward

    def unpack(self, saved: _Kept | _Saved) -> torch.Tensor:
        """Autograd wants a saved tensor."""
        while self._leaving:
            self._gone()
        if isinstance(saved, _Kept):
            return saved.get()
        value = saved.value
        with torch.no_grad():
            if value.call is None:
                held = self._fetch(value)
            else:
                held = self._make(value) if value.there is None else value.there
            return saved.view.on(held)

    def _make(self, wanted: Value) -> torch.Tensor:
        """Run the operators again that lead to a value; what later uses want stays."""
        calls = self._to_run(wanted)
        last_reader = {source.number: call for call in calls for source in call.inputs}
        held: dict[int, torch.Tensor] = {}
        for call in calls:
            for source in call.inputs:
                if source.call is None:
                    held[source.number] = self._fetch(source)
                elif source.there is not None:
                    held[source.number] = source.there
        for call in calls:
            made = call.again(held)
            for reference in call.makes:
                value = reference()
                if value is None or value.there is not None:
                    continue
                if value is wanted or value.uses:
                    value.there = made[value.output]
                if last_reader.get(value.number) is not None:
                    held[value.number] = made[value.output]
            del made
            for source in call.inputs:
                if last_reader[source.number] is call:
                    held.pop(source.number, None)
        assert wanted.there is not None
        return wanted.there

    def _to_run(self, wanted: Value) -> list[Call]:
        assert wanted.call is not None
        found, left = {wanted.call.number: wanted.call}, [wanted.call]
        while left:
            for source in left.pop().inputs:
                call = source.call
                if call is not None and source.there is None and call.number not in found:
                    found[call.number] = call
                    left.append(call)
        return [found[number] for number in sorted(found)]


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """What this thread runs inside is no part of a forward pass that is under way."""
    under_way = [m for m in _get_current_dispatch_mode_stack() if isinstance(m, _Forward)]
    before = [mode.is_aside for mode in under_way]
    for mode in under_way:
        mode.is_aside = True
    try:
        yield
    finally:
        for mode, was in zip(under_way, before, strict=True):
            mode.is_aside = was


class ActivationEngine:
    """Carries out a memory plan in every forward pass and the backward pass that follows.

    Args:
        plan: what becomes of each value.
        to: where a CPU moves values; see `host.zeros_on_host`.
        transfers: that move them; None: of its own.
    """

    def __init__(
        self, plan: MemoryPlan, to: To = "shm", transfers: Transfers | None = None
    ) -> None:
        self.plan = plan
        self._script = Script(plan)
        self._acts = any(action != KEEP for action in plan.actions)
        self._transfers = transfers or Transfers(to)

    @property
    def moved_bytes(self) -> int:
        """Written to the host so far."""
        return self._transfers.written_bytes

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward pass with its loss; nothing happens where no gradient is wanted."""
        if not self._acts or not torch.is_grad_enabled():
            yield
            return
        begun = _Forward(self.plan, self._script, self._transfers)
        with begun, torch.autograd.graph.saved_tensors_hooks(begun.pack, begun.unpack):
            yield
        begun.end()

    def close(self) -> None:
        """End the thread that moves."""
        self._transfers.close()
