"""Which storages are alive, as PyTorch's dispatcher shows them; which have been written to."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

# `torch.utils._python_dispatch` and `_pytree` are what PyTorch's own memory tracker is built on.


# Modules of PyTorch that stand between whoever runs an operator and a dispatch mode.
BETWEEN = ("torch._compile", "torch._dynamo", "torch._ops", "torch._stats", "torch._subclasses")
# Arguments of batch normalisation that it advances in training.
STATISTICS = frozenset({"running_mean", "running_var"})


def tensors_in(*trees: Any) -> list[torch.Tensor]:
    """All tensors in nested arguments or results that have storages; sparse ones hold two such."""
    leaves = (leaf for leaf in tree_leaves(trees) if isinstance(leaf, torch.Tensor))
    return [leaf for leaf in leaves if not leaf.is_sparse]


def is_question(func: Any) -> bool:
    """Whether an operator only tells something of a tensor; fake tensors have more of these."""
    return bool(func.namespace == "prim")


def allocated_bytes(storage: torch.UntypedStorage) -> int:
    """What a storage takes: on a GPU the allocator hands out multiples of 512 bytes.

    Example:
        >>> allocated_bytes(torch.zeros(3).untyped_storage())
        12
    """
    size = storage.nbytes()
    return -(-size // 512) * 512 if storage.device.type == "cuda" else size


@dataclass(frozen=True)
class View:
    """How a tensor lies in its storage.

    Attributes:
        is_conj: it is read as the conjugate of what lies there.
        is_neg: it is read with the opposite sign (the imaginary part of a conjugate is).
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    is_conj: bool
    is_neg: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> View:
        """That of a tensor."""
        return View(
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
            dtype=tensor.dtype,
            is_conj=tensor.is_conj(),
            is_neg=tensor.is_neg(),
        )

    def on(self, held: torch.Tensor) -> torch.Tensor:
        """The tensor in the storage of another one."""
        if held.dtype is self.dtype:
            made = held.as_strided(self.shape, self.stride, self.offset)
        else:
            made = torch.empty(0, dtype=self.dtype, device=held.device)
            made = made.set_(held.untyped_storage(), self.offset, self.shape, self.stride)
        if made.is_conj() != self.is_conj:
            made = torch._conj(made)
        return made if made.is_neg() == self.is_neg else torch._neg_view(made)


class _Seen(NamedTuple):
    """A storage, by its number; the node of the graph whose gradients were computed then."""

    number: int
    storage: weakref.ref[torch.UntypedStorage]
    node: int | None


class _Sum(NamedTuple):
    """A sum of gradients that is not counted yet; numbers of its terms."""

    total: torch.Tensor
    first: int
    second: int
    node: int | None


class LiveStorages:
    """Storages that have been seen and have not died.

    Args:
        on_birth: told of a storage that is seen for the first time.
        on_death: told the number of one that has died.

    Attributes:
        lock: held while it is told: a storage may die on any thread.
    """

    def __init__(
        self,
        on_birth: Callable[[int, torch.UntypedStorage], None],
        on_death: Callable[[int], None],
    ) -> None:
        self._on_birth, self._on_death = on_birth, on_death
        self.lock = threading.RLock()
        self._numbers: dict[int, _Seen] = {}
        self._count = 0
        self._sum: _Sum | None = None

    def find(self, tensor: torch.Tensor) -> int | None:
        """The number of the tensor's storage; None if it has not been seen."""
        entry = self._entry(tensor)
        return None if entry is None else entry.number

    def _entry(self, tensor: torch.Tensor) -> _Seen | None:
        storage = tensor.untyped_storage()
        entry = self._numbers.get(storage._cdata)
        return entry if entry is not None and entry.storage() is storage else None

    def see(self, tensor: torch.Tensor) -> int:
        """The number of the tensor's storage, which is seen for the first time if it is new."""
        with self.lock:
            self.settle_sum()
            return self._see(tensor, _node())

    def _see(self, tensor: torch.Tensor, node: int | None) -> int:
        found = self.find(tensor)
        if found is not None:
            return found
        storage = tensor.untyped_storage()
        number, key = self._count, storage._cdata
        self._count += 1

        def died(_: object) -> None:
            with self.lock:
                if self._sum is not None and number == self._sum.second:
                    self.settle_sum()  # the first one is held by somebody: both were there
                entry = self._numbers.get(key)
                if entry is not None and entry.number == number:
                    del self._numbers[key]
                self._on_death(number)
                if self._sum is not None and number == self._sum.first:
                    self.settle_sum()

        self._numbers[key] = _Seen(number, weakref.ref(storage, died), node)
        self._on_birth(number, storage)
        return number

    def see_all(self, tensors: Iterable[torch.Tensor]) -> list[int]:
        """`see` for each."""
        return [self.see(tensor) for tensor in tensors]

    def see_sum(self, total: torch.Tensor, terms: Sequence[torch.Tensor]) -> None:
        """See a sum of two gradients, which may take the place of the first one.

        Where two gradients of a tensor meet, PyTorch's engine adds the second one to the first one
        in place if nobody else holds that one; but never while a dispatch mode watches. So that
        what is watched counts as what is not, the sum is born when the first one has died, if that
        is the next thing to happen. Not where the node of the graph that has just run made the
        first one itself and has no two gradients for one tensor: then it is the node that adds.
        """
        with self.lock:
            self.settle_sum()
            first, second = (self._entry(term) for term in terms)
            node = _node()
            apart = first is not second
            if first and second and apart and (first.node != node or _gives_twice()):
                self._sum = _Sum(total, first.number, second.number, node)
            else:
                self._see(total, node)

    def settle_sum(self) -> None:
        """A sum that is not counted yet is from now on."""
        with self.lock:
            if self._sum is not None:
                pending, self._sum = self._sum, None
                self._see(pending.total, pending.node)


def _node() -> int | None:
    """The node of the graph whose gradients are being computed on this thread."""
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def _gives_twice() -> bool:
    """Whether that node has several gradients for one tensor, as that of `x * x` has."""
    node = torch._C._current_autograd_node()
    to = [] if node is None else [following for following in node.next_functions if following[0]]
    return len(set(to)) < len(to)


def is_sum_of_gradients(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether it may be the engine that adds two gradients of one tensor: see `see_sum`.

    The engine writes over the first one, unless a graph of the backward pass is made, or that is a
    view (the transposed gradient of a layer's weights): its base is a second owner of the storage.
    """
    return (
        func is torch.ops.aten.add.Tensor
        and torch._C._current_graph_task_id() != -1
        and not torch.is_grad_enabled()
        and all(isinstance(term, torch.Tensor) for term in args)
        and args[0].shape == args[1].shape
        and not args[0]._is_view()
        and _comes_from_engine()
    )


def _comes_from_engine() -> bool:
    """Whether an operator is run by PyTorch's engine, not by a function, hook or model in Python.

    For operators that a dispatch mode is being told of.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        name, module = frame.f_code.co_name, frame.f_globals.get("__name__", "")
        if name != "__torch_dispatch__" and not module.startswith(BETWEEN):
            return bool(module == "torch.autograd.graph")
    return True  # a thread of the engine itself, as for other devices than the CPU


def statistics_of(func: Any, args: tuple[Any, ...]) -> frozenset[int]:
    """Places of running statistics that an operator advances and that its results do not need."""
    arguments = func._schema.arguments
    training = next((n for n, argument in enumerate(arguments) if argument.name == "training"), -1)
    if 0 <= training < len(args) and not args[training]:
        return frozenset()
    return frozenset(n for n, argument in enumerate(arguments) if argument.name in STATISTICS)


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operator writes to, by its schema; running statistics left out."""
    found: list[torch.Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        if argument.name in STATISTICS:
            continue
        given = args[place] if place < len(args) else kwargs.get(argument.name)
        found += tensors_in(given)
    return found


class Writes:
    """How often operators of a forward pass have written to storages that were there."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def add(self, tensor: torch.Tensor) -> None:
        """An operator has written to it."""
        key = tensor.untyped_storage()._cdata
        self._counts[key] = self._counts.get(key, 0) + 1

    def counter(self, tensor: torch.Tensor) -> Callable[[], int]:
        """How often it was written to by now, in this forward pass or by anybody after it.

        The tensor's storage must stay alive.
        """
        key = tensor.untyped_storage()._cdata
        root = tensor if tensor._base is None else tensor._base  # they share a version
        # A tensor that nobody else holds any more is not written to, and would hold its graph.
        alive, before = weakref.ref(root), root._version

        def count() -> int:
            there = alive()
            later = 0 if there is None else there._version - before
            return self._counts.get(key, 0) + later

        return count
