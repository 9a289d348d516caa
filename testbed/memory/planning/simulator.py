"""How much memory and time a step takes with an action for each value. Pure.

What does not depend on the actions is prepared once, so that a planner can try many.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from testbed.memory.planning.gradients import Levels, exchange_bytes, gradient_bytes, update_bytes
from testbed.memory.planning.lifetimes import (
    KEEP,
    MOVED,
    OFFLOAD,
    OFFLOAD_SYNC,
    OFFLOAD_WINDOW,
    RECOMPUTE,
    Costs,
    Footprint,
    Lifetimes,
    ends,
)

_KEEP, _RECOMPUTE = ord(KEEP), ord(RECOMPUTE)
_MOVED = MOVED.encode()


def simulate(lifetimes: Lifetimes, actions: str, costs: Costs | None = None) -> Footprint:
    """Play one step back with an action for each value.

    Args:
        lifetimes: of the step.
        actions: one letter for each value; see `Action` and `settled`.
        costs: of moving.

    Example:
        >>> from testbed.memory.planning.lifetimes import ForwardOp, Use, Value
        >>> use = Use(packed=0, unpacked=3, released=4)
        >>> value = Value(num_bytes=8, op=0, born=0, dies=1, uses=(use,))
        >>> step = Lifetimes(units=("a",), ops=(ForwardOp(name="x", unit=0),), values=(value,),
        ...                  base=(0, 4, 0, 0, 4), time_s=(0.0, 1.0, 2.0, 3.0, 4.0))
        >>> [simulate(step, action).peak_bytes for action in "kr"]
        [12, 8]
    """
    return Simulator(lifetimes, costs).footprint(actions)


class Simulator:
    """One recorded step, to be played back with many assignments of actions.

    Args:
        lifetimes: of the step.
        costs: of moving, and what becomes of gradients.
    """

    def __init__(self, lifetimes: Lifetimes, costs: Costs | None = None) -> None:
        self.lifetimes, self.costs = lifetimes, costs or Costs()
        values = lifetimes.values
        self.inputs = [value.inputs for value in values]
        self.sizes = [value.num_bytes for value in values]
        self.size = np.array(self.sizes, dtype=np.int64)
        self.born = np.array([value.born for value in values], dtype=np.int64)
        self.dies = np.array([value.dies for value in values], dtype=np.int64)
        self.packed = [min((u.packed for u in v.uses), default=-1) for v in values]
        self.saved = sorted((p, number) for number, p in enumerate(self.packed) if p >= 0)
        self.released = [max((u.released for u in v.uses), default=-1) for v in values]
        self.ops = [value.op for value in values]
        self.op_s = [op.time_s for op in lifetimes.ops]
        self.made_by: list[list[int]] = [[] for _ in lifetimes.ops]
        for number, value in enumerate(values):
            self.made_by[value.op].append(number)
        self.readers: list[list[int]] = [[] for _ in values]
        for number, value in enumerate(values):
            for source in value.inputs:
                self.readers[source].append(number)
        self.replaces = [-1 if v.replaces is None else v.replaces for v in values]
        overwritten = {v.replaces for v in values if v.replaces is not None}
        self.delicate = [
            (number, value.is_fixed, [u for u in value.inputs if u in overwritten])
            for number, value in enumerate(values)
            if value.is_fixed or not overwritten.isdisjoint(value.inputs)
        ]
        least = lifetimes.least_moved_bytes
        self.unmoved = [
            n for n, v in enumerate(values) if v.uses and (v.num_bytes < least or v.stays)
        ]
        self.unsaved = [number for number, value in enumerate(values) if not value.uses]
        self.own_ends = ends(lifetimes, KEEP * len(values))
        self.wanted = sorted(
            (use.unpacked, number)
            for number, value in enumerate(values)
            for use in value.uses
            if use.unpacked >= 0
        )
        first: dict[int, int] = {}
        for position, number in self.wanted:
            first.setdefault(number, position)
        self.first_wanted = [(position, number) for number, position in first.items()]
        last = lifetimes.num_positions - 1
        self.first_unpacked = self.wanted[0][0] if self.wanted else last
        self.gradients = gradient_bytes(lifetimes, self.costs)
        update = update_bytes(lifetimes, self.costs.in_flight)
        self.temporary = np.asarray(lifetimes.base, dtype=np.int64) + update
        self.exchanged = exchange_bytes(lifetimes, self.costs)
        self.op_workspace = [0] * len(lifetimes.ops)
        if self.costs.with_workspace and lifetimes.workspace:
            self.temporary = self.temporary + np.asarray(lifetimes.workspace, dtype=np.int64)
            self.op_workspace = [op.workspace_bytes for op in lifetimes.ops]
        self.samples = np.full(lifetimes.num_positions, lifetimes.sample_bytes, dtype=np.int64)
        self.samples[-1] = 0  # the optimizer's step has no need of them
        self.always = self.temporary + self.gradients + self.exchanged + self.samples
        self.resting_bytes = lifetimes.weight_bytes + lifetimes.optimizer_bytes
        self.time_s = lifetimes.time_s
        self.ready_at = [gradient.position for gradient in lifetimes.gradients]

    def footprint(self, actions: str) -> Footprint:
        """What these actions take; see `simulate`."""
        found = self.settled(actions)
        return _Replay(self, found, self.ends(found)).footprint()

    def curve(self, actions: str) -> tuple[list[float], dict[str, list[int]]]:
        """When each event happens, and the bytes alive then by category, in the tracker's words."""
        found = self.settled(actions)
        replay, step = _Replay(self, found, self.ends(found)), self.lifetimes
        high = replay.levels()
        times = np.asarray(step.time_s or range(step.num_positions)) + replay.late_s()
        levels: dict[str, list[int]] = {
            "weights": [step.weight_bytes] * step.num_positions,
            "optimizer": [step.optimizer_bytes] * step.num_positions,
            "communication": self.exchanged.tolist(),
            "gradients": self.gradients.tolist(),
            "temporary": self.temporary.tolist(),
            "activations": (high - self.always + self.samples).tolist(),
        }
        return times.tolist(), levels

    def settled(self, actions: str) -> str:
        """As `lifetimes.settled`, and faster."""
        found = bytearray(actions.encode())
        for number, is_fixed, sources in self.delicate:
            if found[number] == _RECOMPUTE and (
                is_fixed or any(found[source] != _RECOMPUTE for source in sources)
            ):
                found[number] = _KEEP
        for number in self.unmoved:
            if found[number] in _MOVED:
                found[number] = _KEEP
        for number in reversed(self.unsaved):
            letter = found[number]
            if letter in _MOVED or (letter == _RECOMPUTE and not self._is_wanted(number, found)):
                found[number] = _KEEP
        return found.decode()

    def _is_wanted(self, number: int, actions: bytearray) -> bool:
        return any(actions[reader] == _RECOMPUTE for reader in self.readers[number])

    def ends(self, actions: str) -> list[int]:
        """As `lifetimes.ends`, and faster."""
        found, inputs = self.own_ends.copy(), self.inputs
        number = actions.rfind(RECOMPUTE)
        while number >= 0:
            end = found[number]
            for source in inputs[number]:
                if found[source] < end:
                    found[source] = end
            number = actions.rfind(RECOMPUTE, 0, number)
        return found


class _Replay:
    """One step with its actions; used once."""

    def __init__(self, step: Simulator, actions: str, until: list[int]) -> None:
        self.step, self.actions, self.ends = step, actions, until
        self.order: tuple[int, ...] = ()
        self.place: dict[int, int] = {}
        self.begins: list[tuple[int, int, int]] = []  # begin, end, bytes
        self.begun: dict[int, int] = {}  # bytes by the position at which they are there
        self.made: set[int] = set()
        self.fetched: dict[int, float] = {}  # on its way back or there: when it arrives
        self.bursts: list[tuple[int, int]] = []  # position, bytes above the level before it
        self.delay_s = 0.0
        self.delays: list[tuple[int, float]] = []
        self.recomputed_s = 0.0
        self.host_free_s = 0.0
        self.moved_bytes = 0

    def levels(self) -> Levels:
        """Bytes at each position, without what rests all the time."""
        self._forward()
        self._backward()
        step = self.step
        held = np.cumsum(self._changes()[:-1])
        high = step.always + held
        if self.bursts:
            at = np.array([position for position, _ in self.bursts])
            above = np.array([burst for _, burst in self.bursts], dtype=np.int64)
            before = np.where(at > 0, held[at - 1], 0)
            np.maximum.at(high, at, step.always[at] + before + above)
        return high

    def footprint(self) -> Footprint:
        step, high = self.step, self.levels()
        at_peak = int(high.argmax())
        return Footprint(
            peak_bytes=int(high[at_peak]) + step.resting_bytes,
            position=at_peak,
            activation_bytes=int(high[at_peak] - step.always[at_peak] + step.samples[at_peak]),
            gradient_bytes=int(step.gradients[at_peak]),
            temporary_bytes=int(step.temporary[at_peak]),
            exchange_bytes=int(step.exchanged[at_peak]),
            extra_s=self.delay_s,
            recomputed_s=self.recomputed_s,
            moved_bytes=self.moved_bytes,
            ready_s=self._ready(),
        )

    def _changes(self) -> Levels:
        """Bytes that come and go at each position; who leaves for the host is among `begins`."""
        step = self.step
        change = np.zeros(step.lifetimes.num_positions + 1, dtype=np.int64)
        letters = np.frombuffer(self.actions.encode(), dtype=np.uint8)
        until = np.where(letters == _RECOMPUTE, step.dies, self.ends)
        there = ~np.isin(letters, list(_MOVED)) & (until > step.born)
        np.add.at(change, step.born[there], step.size[there])
        np.subtract.at(change, until[there], step.size[there])
        for begin, end, num_bytes in self.begins:
            change[begin] += num_bytes
            change[end] -= num_bytes
        return change

    def _alive(self, number: int, begin: int, end: int) -> None:
        if end > begin:
            num_bytes = self.step.sizes[number]
            self.begins.append((begin, end, num_bytes))
            self.begun[begin] = self.begun.get(begin, 0) + num_bytes

    def _forward(self) -> None:
        """What leaves for the host, in the order in which it is saved."""
        if OFFLOAD not in self.actions and OFFLOAD_SYNC not in self.actions:
            return
        step = self.step
        self.order = tuple(n for _, n in step.first_wanted if self.actions[n] in MOVED)
        self.place = {number: place for place, number in enumerate(self.order)}
        leaving = [(p, n) for p, n in step.saved if self.actions[n] in MOVED]
        for place, (packed, number) in enumerate(leaving):
            waits = self.actions[number] == OFFLOAD_SYNC
            after = place + OFFLOAD_WINDOW
            gone = leaving[after][0] if after < len(leaving) else step.first_unpacked
            value = step.lifetimes.values[number]
            self._alive(number, value.born, max(value.dies, packed if waits else gone))
            if place >= OFFLOAD_WINDOW:
                self._wait_for_host(packed)
            self._copy(packed, value.num_bytes)
            if waits:
                self._wait_for_host(packed)
            self.moved_bytes += value.num_bytes
        self._wait_for_host(step.first_unpacked)

    def _backward(self) -> None:
        actions = self.actions
        for position, number in self.step.wanted:
            action = actions[number]
            if action == KEEP:
                continue
            if action in MOVED:
                self._fetch(number, position)
            elif not self._is_made(number, position):
                self._make(number, position)

    def _is_made(self, number: int, position: int) -> bool:
        return number in self.made and self.step.released[number] > position

    def _fetch(self, number: int, position: int) -> None:
        """Bring a value back, and send for those that are wanted next."""
        if number not in self.fetched:
            self._begin_fetch(number, position)
        self._delay(position, self.fetched[number] - self._now(position))
        place = self.place.get(number)
        if place is not None:
            for following in self.order[place + 1 : place + 1 + OFFLOAD_WINDOW]:
                if following not in self.fetched and self.actions[following] == OFFLOAD:
                    self._begin_fetch(following, position)

    def _begin_fetch(self, number: int, position: int) -> None:
        self._alive(number, position, self.ends[number])
        self.fetched[number] = self._copy(position, self.step.sizes[number])

    def _to_run(self, wanted: int, position: int) -> list[tuple[int, tuple[int, ...]]]:
        """Operators to run again for a value, in their order, with what they read.

        What comes from the host is brought on the way.
        """
        step, actions, inputs = self.step, self.actions, self.step.inputs
        found = {step.ops[wanted]: inputs[wanted]}
        left, on_host = [inputs[wanted]], set()
        while left:
            for source in left.pop():
                if actions[source] == RECOMPUTE:
                    op = step.ops[source]
                    if op not in found and not self._is_made(source, position):
                        found[op] = inputs[source]
                        left.append(inputs[source])
                elif actions[source] in MOVED:
                    on_host.add(source)
        for source in sorted(on_host):
            self._fetch(source, position)
        return sorted(found.items())

    def _make(self, wanted: int, position: int) -> None:
        """Run the operators again that lead to a value; what later uses want stays.

        An operator makes all its outputs: those that are there or that nobody wants go at once.
        """
        step, actions, sizes = self.step, self.actions, self.step.sizes
        before = self.begun.get(position, 0)
        ops = self._to_run(wanted, position)
        last_reader = {source: op for op, sources in ops for source in sources}
        level = high = self.begun.get(position, 0) - before  # what was fetched
        held: dict[int, int] = {}
        run_s = 0.0
        for op, sources in ops:
            run_s += step.op_s[op]
            gone = 0
            for number in step.made_by[op]:
                level += sizes[number] - held.pop(step.replaces[number], 0)
                wanted_later = step.released[number] > position and number not in self.made
                if number == wanted or (actions[number] == RECOMPUTE and wanted_later):
                    self.made.add(number)
                    self._alive(number, position, step.released[number])
                elif last_reader.get(number, -1) > op and actions[number] == RECOMPUTE:
                    held[number] = sizes[number]
                else:
                    gone += sizes[number]
            high = max(high, level + step.op_workspace[op])
            level -= gone
            for source in sources:
                if last_reader[source] == op:
                    level -= held.pop(source, 0)
        self.recomputed_s += run_s
        self._delay(position, run_s)
        self.bursts.append((position, high))

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
        takes_s = num_bytes / self.step.costs.host_bytes_per_s
        self._delay(position, takes_s * self.step.costs.copy_share)
        self.host_free_s = max(self.host_free_s, self._now(position)) + takes_s
        return self.host_free_s

    def _wait_for_host(self, position: int) -> None:
        self._delay(position, self.host_free_s - self._now(position))

    def late_s(self) -> npt.NDArray[np.float64]:
        """By how much each event happens later than with all activations kept."""
        delays = np.zeros(self.step.lifetimes.num_positions)
        for position, by_s in self.delays:
            delays[position] += by_s
        return np.cumsum(delays)

    def _ready(self) -> tuple[float, ...]:
        step = self.step
        if not step.time_s:
            return ()
        late = self.late_s()
        return tuple(step.time_s[at] + float(late[at]) for at in step.ready_at)
