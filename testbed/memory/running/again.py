"""Operators of a forward pass that are run again for what they made."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from testbed.base.errors import RunFailed
from testbed.memory.recording.storages import View, Writes, statistics_of, tensors_in
from testbed.memory.running.transfers import Copy


@dataclass(frozen=True)
class Source:
    """An argument that is kept: as it was when the operator read it."""

    tensor: torch.Tensor
    version: int
    now: Callable[[], int]
    op: str

    def get(self) -> torch.Tensor:
        """The tensor, unless it has been changed."""
        if self.now() != self.version:
            raise RunFailed(
                f"{self.op} cannot be run again: a tensor that it read has been changed in place "
                "since; use --memory none, or change the model not to"
            )
        return self.tensor


@dataclass(frozen=True)
class Made:
    """An argument that lies in a value which is moved or made again."""

    value: Value
    view: View


class Call:
    """One run of an operator, to be repeated.

    Attributes:
        number: in the order of the forward pass.
        inputs: values that are moved or made again, and that it reads.
        makes: values that it makes, as long as somebody wants them.
    """

    def __init__(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        find: Callable[[torch.Tensor], Value | None],
        writes: Writes,
        number: int,
    ) -> None:
        self.number = number
        self.makes: list[weakref.ref[Value]] = []
        statistics = statistics_of(func, args)  # left out, they are not advanced twice
        args = tuple(None if n in statistics else given for n, given in enumerate(args))
        leaves, self._tree = tree_flatten((args, kwargs))
        self.func, self.name = func, str(func)
        self._leaves = [
            self._held(leaf, find, writes) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ]
        self.inputs = list(
            {id(leaf.value): leaf.value for leaf in self._leaves if isinstance(leaf, Made)}.values()
        )
        self._random = _Random(leaves) if _may_draw(func) else None
        self._is_graded = torch.is_grad_enabled()

    def _held(
        self,
        tensor: torch.Tensor,
        find: Callable[[torch.Tensor], Value | None],
        writes: Writes,
    ) -> Made | Source:
        value = find(tensor)
        if value is not None:
            return Made(value, View.of(tensor))
        now = writes.counter(tensor)
        return Source(tensor.detach(), now(), now, self.name)

    def again(self, held: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """Run it; `held` has what its inputs hold, by their numbers."""
        leaves = []
        for leaf in self._leaves:
            if isinstance(leaf, Made):
                leaf = leaf.view.on(held[leaf.value.number])
            elif isinstance(leaf, Source):
                leaf = leaf.get()
            leaves.append(leaf)
        args, kwargs = tree_unflatten(leaves, self._tree)
        drawing = nullcontext() if self._random is None else self._random.as_it_was()
        # Below autograd, where it ran before: some make more where a gradient is wanted.
        below = torch._C._AutoDispatchBelowAutograd()
        graded = torch.set_grad_enabled(self._is_graded)
        with drawing, below, graded, _without_casts(leaves):
            return tensors_in(self.func(*args, **kwargs))


def _may_draw(func: Any) -> bool:
    """Whether an operator may draw random numbers; nobody knows what libraries' own ones do."""
    return torch.Tag.nondeterministic_seeded in func.tags or func.namespace != "aten"


class _Random:
    """The state of the generator that an operator draws from, before it does."""

    def __init__(self, leaves: list[Any]) -> None:
        given = next((leaf for leaf in leaves if isinstance(leaf, torch.Generator)), None)
        self._generator = given or _generator_of(leaves)
        self._state = self._generator.get_state()

    @contextlib.contextmanager
    def as_it_was(self) -> Iterator[None]:
        """Draw the same numbers inside."""
        now = self._generator.get_state()
        self._generator.set_state(self._state)
        try:
            yield
        finally:
            self._generator.set_state(now)


def _without_casts(leaves: list[Any]) -> AbstractContextManager[Any]:
    """What an operator was given had been cast already."""
    kind = next((leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)), "cpu")
    if not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)


def _generator_of(leaves: list[Any]) -> torch.Generator:
    """Of the device that an operator works on, as its arguments tell."""
    devices = [leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)]
    devices += [leaf for leaf in leaves if isinstance(leaf, torch.device)]
    device = next((d for d in devices if d.type == "cuda"), None)
    if device is None:
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


class Value:
    """What one storage holds, that is moved or made again.

    Attributes:
        number: in the plan.
        call: makes it; None: it is moved to the host.
        output: which of the call's results it is.
        uses: saved tensors in it that are still wanted.
        there: a tensor with its storage, once it is made again or back from the host.
        copy: on the host.
    """

    def __init__(self, number: int, call: Call | None, output: int) -> None:
        self.number, self.call, self.output = number, call, output
        if call is not None:
            call.makes.append(weakref.ref(self))
        self.uses = 0
        self.there: torch.Tensor | None = None
        self.copy: Copy | None = None

    @property
    def inputs(self) -> list[Value]:
        """What its operator reads, of what is moved or made again."""
        return [] if self.call is None else self.call.inputs
