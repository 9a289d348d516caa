"""The lifetimes of a step's storages, and how much memory a choice of actions takes. No I/O.

A recording (`memory.capture`) runs one step on fake tensors in which nothing is saved for the
backward pass: it tells how long each storage lives without autograd, when autograd saves a tensor,
unpacks it and lets it go. `simulate` puts the saved tensors back as an assignment of actions says:

- `keep`: a value lives until its last saved use has ended, as in PyTorch;
- `offload`: it leaves when its copy on the host is written and returns before its use;
- `recompute`: it is dropped after the forward pass and made again where it is used, by running
  the operators again from the nearest values that are there.

Positions number the events of the recording (an operator begins or ends, a tensor is saved,
unpacked or let go, a storage dies): exact order, no times.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt


class Action(enum.Enum):
    """What becomes of a value after its last use in the forward pass."""

    KEEP = "k"
    RECOMPUTE = "r"
    OFFLOAD = "o"


KEEP, RECOMPUTE, OFFLOAD = (a.value for a in (Action.KEEP, Action.RECOMPUTE, Action.OFFLOAD))
OFFLOAD_WINDOW: Final = 1
"""Copies to the host, and from it ahead of use, that may be under way at once."""


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """One saved tensor: positions at which it is packed, unpacked (-1: never) and let go."""

    packed: int
    unpacked: int
    released: int


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """What one storage holds from one operator on that wrote it.

    Attributes:
        num_bytes: of the storage.
        op: number of the operator that makes it, in the order of the forward pass.
        output: which of the operator's outputs it is.
        inputs: values that the operator reads.
        born: position at which it is there.
        dies: position at which nothing holds it any more, were nothing saved.
        uses: saved tensors that lie in it.
        replaces: the value in the same storage that the operator overwrote; that ends here.
        is_fixed: the operator cannot be run again.
    """

    num_bytes: int
    op: int
    output: int = 0
    inputs: tuple[int, ...] = ()
    born: int
    dies: int
    uses: tuple[Use, ...] = ()
    replaces: int | None = None
    is_fixed: bool = False


class ForwardOp(msgspec.Struct, frozen=True, kw_only=True):
    """An operator of the forward pass.

    Attributes:
        name: as PyTorch's dispatcher calls it.
        unit: number of the layer that runs it.
        time_s: what running it again takes.
    """

    name: str
    unit: int
    time_s: float = 0.0


class GradientReady(msgspec.Struct, frozen=True, kw_only=True):
    """The gradient of a parameter is final at a position of the recording."""

    name: str
    num_bytes: int
    position: int


class Lifetimes(msgspec.Struct, frozen=True, kw_only=True):
    """One recorded step.

    Attributes:
        units: names of the layers, in the order of their first operator.
        ops: of the forward pass.
        values: made by it, in the order of their operators.
        base: [positions], bytes of all storages that are no values (temporary ones of the backward
            pass), without weights, gradients of parameters and optimizer state.
        time_s: [positions], when the event happens if nothing is saved in another way.
        gradients: of parameters, in the order in which they are ready.
        weight_bytes: parameters, buffers and the samples of the step.
        optimizer_bytes: what the optimizer keeps between steps.
    """

    units: tuple[str, ...]
    ops: tuple[ForwardOp, ...]
    values: tuple[Value, ...]
    base: tuple[int, ...]
    time_s: tuple[float, ...] = ()
    gradients: tuple[GradientReady, ...] = ()
    weight_bytes: int = 0
    optimizer_bytes: int = 0

    @property
    def num_positions(self) -> int:
        """Number of recorded events."""
        return len(self.base)


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """What moving takes, and what becomes of gradients.

    Attributes:
        host_bytes_per_s: between the device and the host; both ways share it.
        copy_share: share of a copy's time that the computing thread loses to it (cores and
            memory bandwidth), overlapped or not.
        in_flight: gradients of parameters are freed as they get ready, but for so many that are
            on their way; None: all stay until the optimizer's step.
    """

    host_bytes_per_s: float = 4e9
    copy_share: float = 0.3
    in_flight: int | None = None


class Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """What a choice of actions takes.

    Attributes:
        peak_bytes: largest number of bytes alive at once, weights and all.
        position: at which.
        activation_bytes: of values alive at the peak, those made again included.
        gradient_bytes: of parameters alive at the peak.
        temporary_bytes: of the recording's other storages at the peak.
        extra_s: how much longer a step takes than if all is kept.
        recomputed_s: part of it: running operators again.
        moved_bytes: written to the host in a step; as many are read back.
        ready_s: when each gradient is ready, from the beginning of the step.
    """

    peak_bytes: int
    position: int
    activation_bytes: int
    gradient_bytes: int
    temporary_bytes: int
    extra_s: float
    recomputed_s: float
    moved_bytes: int
    ready_s: tuple[float, ...]


def settled(lifetimes: Lifetimes, actions: str) -> str:
    """The actions that can be carried out: what cannot be made again is kept.

    A value is made again only from values that nothing overwrites later, or that are made again
    themselves. What nobody saves needs no place on the host.

    Args:
        lifetimes: of the step.
        actions: one letter for each value.
    """
    values = lifetimes.values
    overwritten = {v.replaces for v in values if v.replaces is not None}
    found: list[str] = []
    for value, action in zip(values, actions, strict=True):
        if action == RECOMPUTE:
            blocked = any(u in overwritten and found[u] != RECOMPUTE for u in value.inputs)
            action = KEEP if value.is_fixed or blocked else RECOMPUTE
        elif action == OFFLOAD and not value.uses:
            action = KEEP
        found.append(action)
    return "".join(found)


def fetch_order(lifetimes: Lifetimes, actions: str) -> tuple[int, ...]:
    """Values on the host in the order in which the backward pass first wants them."""
    wanted = {
        number: min(use.unpacked for use in value.uses if use.unpacked >= 0)
        for number, value in enumerate(lifetimes.values)
        if actions[number] == OFFLOAD and any(use.unpacked >= 0 for use in value.uses)
    }
    return tuple(sorted(wanted, key=wanted.__getitem__))


def ends(lifetimes: Lifetimes, actions: str) -> list[int]:
    """For each value the position at which nothing needs it any more.

    What is to be made again holds what it is made from until its own end.
    """
    found = [max([v.dies, *(use.released for use in v.uses)]) for v in lifetimes.values]
    for number in range(len(found) - 1, -1, -1):
        if actions[number] == RECOMPUTE:
            for source in lifetimes.values[number].inputs:
                found[source] = max(found[source], found[number])
    return found


def missing(
    wanted: int, inputs: Sequence[Sequence[int]], is_there: Callable[[int], bool]
) -> list[int]:
    """Values to be made again for one that is wanted, in the order of their operators."""
    found, left = {wanted}, [wanted]
    while left:
        for source in inputs[left.pop()]:
            if source not in found and not is_there(source):
                found.add(source)
                left.append(source)
    return sorted(found)


def simulate(lifetimes: Lifetimes, actions: str, costs: Costs | None = None) -> Footprint:
    """Play one step back with an action for each value.

    Args:
        lifetimes: of the step.
        actions: one letter for each value; see `Action` and `settled`.
        costs: of moving.

    Example:
        >>> use = Use(packed=0, unpacked=3, released=4)
        >>> value = Value(num_bytes=8, op=0, born=0, dies=1, uses=(use,))
        >>> step = Lifetimes(units=("a",), ops=(ForwardOp(name="x", unit=0),), values=(value,),
        ...                  base=(0, 4, 0, 0, 4), time_s=(0.0, 1.0, 2.0, 3.0, 4.0))
        >>> [simulate(step, action).peak_bytes for action in "kr"]
        [12, 8]
    """
    return _Replay(lifetimes, settled(lifetimes, actions), costs or Costs()).footprint()


class _Replay:
    """One step with its actions; used once."""

    def __init__(self, lifetimes: Lifetimes, actions: str, costs: Costs) -> None:
        self.step, self.actions, self.costs = lifetimes, actions, costs
        self.values = lifetimes.values
        self.inputs = [value.inputs for value in self.values]
        self.ends = ends(lifetimes, actions)
        self.order = fetch_order(lifetimes, actions)
        self.place = {number: place for place, number in enumerate(self.order)}
        self.change = np.zeros(lifetimes.num_positions + 1, dtype=np.int64)
        self.made: set[int] = set()  # made again, and still there
        self.fetched: dict[int, float] = {}  # on its way back or there: when it arrives
        self.bursts: list[tuple[int, int]] = []  # position, bytes above the level before it
        self.delay_s = 0.0
        self.delays: list[tuple[int, float]] = []
        self.recomputed_s = 0.0
        self.host_free_s = 0.0
        self.moved_bytes = 0

    def footprint(self) -> Footprint:
        self._forward()
        self._backward()
        step, costs = self.step, self.costs
        base = np.asarray(step.base, dtype=np.int64)
        held = np.cumsum(self.change[:-1])
        gradients = self._gradients()
        level = base + held + gradients
        high = level.copy()
        for position, burst in self.bursts:
            before = int(held[position - 1]) if position else 0
            peak = int(base[position] + gradients[position]) + before + burst
            high[position] = max(high[position], peak)
        at = int(high.argmax())
        fixed = step.weight_bytes + step.optimizer_bytes
        return Footprint(
            peak_bytes=int(high[at]) + fixed,
            position=at,
            activation_bytes=int(high[at] - base[at] - gradients[at]),
            gradient_bytes=int(gradients[at]),
            temporary_bytes=int(base[at]),
            extra_s=self.delay_s,
            recomputed_s=self.recomputed_s,
            moved_bytes=self.moved_bytes,
            ready_s=self._ready(costs),
        )

    def _alive(self, number: int, begin: int, end: int) -> None:
        if end > begin:
            num_bytes = self.values[number].num_bytes
            self.change[begin] += num_bytes
            self.change[end] -= num_bytes

    def _forward(self) -> None:
        """Places until the backward pass begins: what is kept, and what leaves for the host."""
        leaving: list[tuple[int, int]] = []
        for number, value in enumerate(self.values):
            action = self.actions[number]
            if action == OFFLOAD:
                leaving.append((min(use.packed for use in value.uses), number))
            else:
                self._alive(
                    number, value.born, value.dies if action == RECOMPUTE else self.ends[number]
                )
        leaving.sort()
        first_unpacked = self._first_unpacked()
        for place, (packed, number) in enumerate(leaving):
            after = place + OFFLOAD_WINDOW
            gone = leaving[after][0] if after < len(leaving) else first_unpacked
            value = self.values[number]
            self._alive(number, value.born, max(value.dies, gone))
            if place >= OFFLOAD_WINDOW:
                self._wait_for_host(packed)
            self._copy(packed, value.num_bytes)
            self.moved_bytes += value.num_bytes
        if leaving:
            self._wait_for_host(first_unpacked)

    def _first_unpacked(self) -> int:
        found = [use.unpacked for v in self.values for use in v.uses if use.unpacked >= 0]
        return min(found, default=self.step.num_positions - 1)

    def _backward(self) -> None:
        wanted = sorted(
            (use.unpacked, number)
            for number, value in enumerate(self.values)
            if self.actions[number] != KEEP
            for use in value.uses
            if use.unpacked >= 0
        )
        for position, number in wanted:
            if self.actions[number] == OFFLOAD:
                self._fetch(number, position)
            elif number not in self.made:
                self._make(number, position)

    def _is_there(self, number: int) -> bool:
        return self.actions[number] != RECOMPUTE or number in self.made

    def _fetch(self, number: int, position: int) -> None:
        """Bring a value back, and send for those that are wanted next."""
        if number not in self.fetched:
            self._begin_fetch(number, position)
        wait_s = self.fetched[number] - self._now(position)
        self._delay(position, max(0.0, wait_s))
        place = self.place[number]
        for following in self.order[place + 1 : place + 1 + OFFLOAD_WINDOW]:
            if following not in self.fetched:
                self._begin_fetch(following, position)

    def _begin_fetch(self, number: int, position: int) -> None:
        self._alive(number, position, self.ends[number])
        self.fetched[number] = self._copy(position, self.values[number].num_bytes)

    def _make(self, wanted: int, position: int) -> None:
        """Run the operators again that lead to a value; what later uses want stays."""
        batch = missing(wanted, self.inputs, self._is_there)
        within = set(batch)
        last_reader: dict[int, int] = {}
        for number in batch:
            for source in self.inputs[number]:
                last_reader[source] = number
        before = int(self.change[position])
        for number in batch:
            for source in self.inputs[number]:
                if self.actions[source] == OFFLOAD:
                    self._fetch(source, position)
        level = high = int(self.change[position]) - before  # what was fetched
        held: dict[int, int] = {}
        ops_run: set[int] = set()
        for number in batch:
            value = self.values[number]
            if value.op not in ops_run:
                ops_run.add(value.op)
                time_s = self.step.ops[value.op].time_s
                self.recomputed_s += time_s
                self._delay(position, time_s)
            replaced = value.replaces if value.replaces in within else None
            if replaced is not None:
                level -= held.pop(replaced, 0)
            level += value.num_bytes
            high = max(high, level)
            if number == wanted or self._last_release(number) > position:
                self.made.add(number)
                self._alive(number, position, self._last_release(number))
            else:
                held[number] = value.num_bytes
            for source in self.inputs[number]:
                if last_reader[source] == number and source in held:
                    level -= held.pop(source)
        self.bursts.append((position, high))

    def _last_release(self, number: int) -> int:
        return max((use.released for use in self.values[number].uses), default=-1)

    # Times

    def _now(self, position: int) -> float:
        times = self.step.time_s
        return (times[position] if times else 0.0) + self.delay_s

    def _delay(self, position: int, by_s: float) -> None:
        if by_s > 0.0:
            self.delay_s += by_s
            self.delays.append((position, by_s))

    def _copy(self, position: int, num_bytes: int) -> float:
        """Queue a copy; returns when it has ended."""
        takes_s = num_bytes / self.costs.host_bytes_per_s
        self._delay(position, takes_s * self.costs.copy_share)
        self.host_free_s = max(self.host_free_s, self._now(position)) + takes_s
        return self.host_free_s

    def _wait_for_host(self, position: int) -> None:
        self._delay(position, self.host_free_s - self._now(position))

    # Gradients

    def _gradients(self) -> npt.NDArray[np.int64]:
        step = self.step
        change = np.zeros(step.num_positions + 1, dtype=np.int64)
        in_flight = self.costs.in_flight
        for number, gradient in enumerate(step.gradients):
            change[gradient.position] += gradient.num_bytes
            if in_flight is not None:
                after = number + in_flight
                gone = after < len(step.gradients)
                end = step.gradients[after].position if gone else step.num_positions
                change[max(end, gradient.position + 1)] -= gradient.num_bytes
        return np.cumsum(change[:-1])

    def _ready(self, costs: Costs) -> tuple[float, ...]:
        if not self.step.time_s:
            return ()
        delays = np.zeros(self.step.num_positions)
        for position, by_s in self.delays:
            delays[position] += by_s
        late = np.cumsum(delays)
        return tuple(
            self.step.time_s[g.position] + float(late[g.position]) for g in self.step.gradients
        )
