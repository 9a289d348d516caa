"""One allocation for many tensors: where each lies, and who holds which bytes at the moment."""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from testbed.base.dtypes import ELEMENT_BYTES
from testbed.base.errors import RunFailed, UsageError
from testbed.base.plan import Plan

ALIGNMENT: Final = 64
"""Bytes: of a cache line, and enough for any vector instruction."""

POISON: Final = 0xFF

PLACEMENTS: Final = 400_000
"""Tensors that `assign` places at most while it looks for something better, all attempts added."""


@dataclass(frozen=True)
class Interval:
    """How long a tensor lives: from moment `born` on, until just before moment `dies`."""

    num_bytes: int
    born: int
    dies: int


@dataclass(frozen=True)
class ArenaPlan:
    """Where each tensor lies.

    Attributes:
        num_bytes: of the allocation that holds them all.
        offsets: of each tensor, in bytes, multiples of `ALIGNMENT`.
        lower_bound_bytes: alive at once at the worst moment; no allocation can be smaller.
    """

    num_bytes: int
    offsets: tuple[int, ...]
    lower_bound_bytes: int

    @property
    def fragmentation(self) -> float:
        """Share of the allocation that is lost even at the worst moment."""
        return 1.0 - self.lower_bound_bytes / self.num_bytes if self.num_bytes else 0.0


def aligned(num_bytes: int) -> int:
    """The number of bytes, rounded up.

    Example:
        >>> aligned(0), aligned(1), aligned(64)
        (0, 64, 64)
    """
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def assign(lifetimes: Sequence[Interval]) -> ArenaPlan:
    """Offsets at which tensors that live at the same moment share no byte.

    Tensors are placed one after another, each into the smallest gap that holds it between those
    that live beside it and are there already. The order decides: several are tried (the largest
    first, the longest-lived first, ...), and the best is improved by placing those tensors earlier
    that have ended up at the top, until the lower bound is reached or `PLACEMENTS` are used up.

    Args:
        lifetimes: of all tensors; equal ones give equal plans.

    Raises:
        UsageError: a tensor of negative size, or that dies before it is born.

    Example:
        >>> plan = assign([Interval(128, 0, 2), Interval(64, 1, 3), Interval(128, 2, 4)])
        >>> plan.num_bytes, plan.offsets, plan.fragmentation
        (192, (0, 128, 0), 0.0)

    Reference:
        Gergov, 1999, SODA (dynamic storage allocation is NP-hard, best known factor 3); Pisarchyk
        and Lee, 2020, MLSys workshop (greedy by size). Departs: the improvement of the order.
    """
    for number, it in enumerate(lifetimes):
        if it.num_bytes < 0 or it.dies < it.born:
            raise UsageError(
                f"lifetime {number} is {it}; expected 0 bytes or more that die no sooner than they "
                "are born"
            )
    bound, padded = _most(lifetimes, lambda n: n), _most(lifetimes, aligned)
    live = [n for n, it in enumerate(lifetimes) if it.num_bytes and it.dies > it.born]
    beside = _beside(lifetimes, live)
    keys: list[Callable[[int], tuple[int, ...]]] = [
        lambda n: (-lifetimes[n].num_bytes, lifetimes[n].born, n),
        lambda n: (lifetimes[n].born - lifetimes[n].dies, -lifetimes[n].num_bytes, n),
        lambda n: (lifetimes[n].num_bytes * (lifetimes[n].born - lifetimes[n].dies), n),
        lambda n: (lifetimes[n].born, lifetimes[n].dies, n),
    ]
    tried = [_Placed.of(lifetimes, sorted(live, key=key), beside) for key in keys]
    best = min(tried, key=lambda placed: placed.height)
    draw = random.Random(0)
    for _ in range(PLACEMENTS // max(1, len(live) * len(live).bit_length())):
        if best.height <= padded:
            break
        again = _Placed.of(lifetimes, best.with_the_top_earlier(lifetimes, draw), beside)
        if again.height <= best.height:
            best = again
    offsets = tuple(best.offsets.get(number, 0) for number in range(len(lifetimes)))
    return ArenaPlan(best.height, offsets, bound)


def _most(lifetimes: Sequence[Interval], size: Callable[[int], int]) -> int:
    """Bytes alive at once at the worst moment."""
    changes = [
        change
        for it in lifetimes
        if it.dies > it.born
        for change in ((it.born, size(it.num_bytes)), (it.dies, -size(it.num_bytes)))
    ]
    alive = most = 0
    for _, change in sorted(changes):  # at the same moment deaths come first
        alive += change
        most = max(most, alive)
    return most


def _beside(lifetimes: Sequence[Interval], live: Sequence[int]) -> dict[int, list[int]]:
    """For each tensor those that live at some moment of its life."""
    found: dict[int, list[int]] = {number: [] for number in live}
    open_ones: list[int] = []
    for number in sorted(live, key=lambda n: lifetimes[n].born):
        born = lifetimes[number].born
        open_ones = [other for other in open_ones if lifetimes[other].dies > born]
        for other in open_ones:
            found[other].append(number)
        found[number] += open_ones
        open_ones.append(number)
    return found


@dataclass
class _Placed:
    """Tensors placed one after another."""

    order: list[int]
    offsets: dict[int, int]
    height: int

    @classmethod
    def of(
        cls, lifetimes: Sequence[Interval], order: list[int], beside: dict[int, list[int]]
    ) -> _Placed:
        offsets: dict[int, int] = {}
        height = 0
        for number in order:
            size = aligned(lifetimes[number].num_bytes)
            taken = sorted(
                (offsets[other], offsets[other] + aligned(lifetimes[other].num_bytes))
                for other in beside[number]
                if other in offsets
            )
            offsets[number] = at = _smallest_gap(taken, size)
            height = max(height, at + size)
        return cls(order, offsets, height)

    def with_the_top_earlier(self, lifetimes: Sequence[Interval], draw: random.Random) -> list[int]:
        """The order in which a tensor that reaches the top comes before some that it came after."""
        ends = {n: at + aligned(lifetimes[n].num_bytes) for n, at in self.offsets.items()}
        top = [place for place, n in enumerate(self.order) if ends[n] == self.height]
        order = list(self.order)
        order.insert(draw.randrange(top[0] + 1), order.pop(draw.choice(top)))
        if draw.random() < 0.5:  # and another one anywhere, so that no attempt is made twice
            order.insert(draw.randrange(len(order)), order.pop(draw.randrange(len(order))))
        return order


def _smallest_gap(taken: Sequence[tuple[int, int]], size: int) -> int:
    """Where the smallest gap that holds `size` bytes begins; above all that is taken if none does.

    Args:
        taken: ranges of bytes, sorted; they may overlap.
        size: to be placed.
    """
    best, best_size, end = -1, 0, 0
    for low, high in taken:
        if low - end >= size and (best < 0 or low - end < best_size):
            best, best_size = end, low - end
        end = max(end, high)
    return end if best < 0 else best


# The fused messages of a plan, of which a few exist at once.


def is_bounded(plan: Plan) -> bool:
    """Whether means can arrive during the backward pass, so that messages make way for others."""
    return not (plan.after_backward or plan.crosses_iteration or plan.halves)


def place_buckets(plan: Plan, in_flight: int) -> ArenaPlan:
    """Where the buffers of fused messages lie if so many of them in a row exist at once.

    A message that is one tensor, or one slice of one, has no buffer and takes 0 bytes. A plan that
    is not `is_bounded` has all buffers at once, and nothing is gained by placing them.

    Args:
        plan: to be carried out; its messages begin in its order.
        in_flight: messages that exist at once.

    Example:
        >>> from testbed.base.plan import Message, TensorSlice
        >>> fused = [Message(parts=(TensorSlice(i, 0, 8), TensorSlice(i + 1, 0, 8)))
        ...          for i in (0, 2, 4)]
        >>> plan = Plan(scheduler="x", names=tuple("abcdef"), num_elements=(8,) * 6,
        ...             dtypes=("float32",) * 6, messages=tuple(fused))
        >>> place_buckets(plan, 1).num_bytes, place_buckets(plan, 2).offsets
        (64, (0, 64, 0))
    """
    sizes = [
        sum(p.stop - p.start for p in message.parts) * ELEMENT_BYTES[plan.dtypes[first.tensor]]
        if len(message.parts) > 1
        else 0
        for message in plan.messages
        for first in message.parts[:1]
    ]
    turns = list(itertools.accumulate(1 if size else 0 for size in sizes))
    pairs = zip(sizes, turns, strict=True)
    return assign([Interval(size, turn, turn + in_flight) for size, turn in pairs])


class Arena:
    """One allocation out of which tensors are taken, and to which they are given back.

    Where it has no room left, a tensor gets memory of its own, which is counted.

    Args:
        num_bytes: of the allocation; 0: every tensor gets memory of its own.
        device: where it lies.
        poisons: what nobody holds is full of bytes 0xFF (not a number, in every floating-point
            format), so that whoever still reads or writes it is noticed; for tests.

    Attributes:
        num_bytes: as given.
        used_bytes: taken and not given back, those beside the allocation included.
        peak_bytes: the most that `used_bytes` has been.
        num_outside: tensors that found no room.

    Example:
        >>> arena = Arena(128, torch.device("cpu"))
        >>> first, second = arena.take(8, torch.float32), arena.take(8, torch.float32)
        >>> arena.used_bytes, arena.num_outside
        (128, 0)
        >>> arena.give_back(first)
        >>> arena.give_back(second)
        >>> arena.used_bytes, arena.peak_bytes
        (0, 128)
    """

    def __init__(self, num_bytes: int, device: torch.device, *, poisons: bool = False) -> None:
        self.num_bytes = num_bytes
        self.used_bytes = self.peak_bytes = self.num_outside = 0
        self._device = device
        self._poisons = poisons
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        if poisons:
            self._memory.fill_(POISON)
        self._taken: list[tuple[int, int]] = []  # ranges of bytes, sorted
        self._held: dict[int, tuple[torch.Tensor, int | None]] = {}  # by the tensor's identity

    def take(self, num_elements: int, dtype: torch.dtype, at: int | None = None) -> torch.Tensor:
        """One dimension of so many elements, whose values do not matter.

        Args:
            num_elements: of the tensor.
            dtype: of them.
            at: offset at which it is to lie if the place is free; None: in the smallest gap.

        Raises:
            RunFailed: somebody has written to memory that was given back (only if it is poisoned).
        """
        size = aligned(num_elements * dtype.itemsize)
        offset = self._place(size, at)
        if offset is None:
            tensor = torch.empty(num_elements, dtype=dtype, device=self._device)
            self.num_outside += 1
        else:
            used = self._memory[offset : offset + num_elements * dtype.itemsize]
            if self._poisons and bool((used != POISON).any()):
                raise RunFailed(
                    f"bytes {offset} to {offset + used.numel()} of an arena were written to after "
                    "they had been given back; expected nobody to hold them"
                )
            tensor = used.view(dtype)
            bisect.insort(self._taken, (offset, offset + size))
        self._held[id(tensor)] = (tensor, offset)
        self.used_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return tensor

    def tensors(self) -> list[torch.Tensor]:
        """What it holds for as long as it lives."""
        return [self._memory] if self.num_bytes else []

    def give_back(self, tensor: torch.Tensor) -> None:
        """The bytes of a tensor that was taken may be used again.

        Raises:
            RunFailed: it was given back before, or is not the tensor that was taken.
        """
        held, offset = self._held.pop(id(tensor), (None, None))
        if held is not tensor:
            raise RunFailed(
                f"a tensor of shape {tuple(tensor.shape)} was given back to an arena that does not "
                "hold it; expected one that was taken and has not been given back yet"
            )
        size = aligned(tensor.nbytes)
        self.used_bytes -= size
        if self._poisons and tensor.numel():
            tensor.view(torch.uint8).fill_(POISON)
        if offset is not None:
            self._taken.remove((offset, offset + size))

    def _place(self, size: int, at: int | None) -> int | None:
        """Where a tensor of so many bytes is to lie; None: there is no room."""
        if at is not None and self._is_free(at, size):
            return at
        found = _smallest_gap([*self._taken, (self.num_bytes, self.num_bytes)], size)
        return found if found + size <= self.num_bytes else None

    def _is_free(self, at: int, size: int) -> bool:
        inside = at % ALIGNMENT == 0 and at + size <= self.num_bytes
        return inside and all(high <= at or at + size <= low for low, high in self._taken)
