"""What no choice of actions can come below: levels of memory and seconds. Pure.

A value that is not kept is there from its making until its last reader of the forward pass, and
from its first use in the backward pass until its last release. A value that is kept is there in
between as well. An operator whose saved output is made again runs at least once more, and what is
moved is copied twice. Nothing else is counted, so every assignment lies above.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from testbed.memory.planning.gradients import Levels
from testbed.memory.planning.lifetimes import KEEP, MOVED, OFFLOAD, RECOMPUTE
from testbed.memory.planning.simulator import Simulator
from testbed.memory.planning.units import values_by_unit

MAX_ROWS: Final = 300
MAX_NODES: Final = 300
SLACK: Final = 1e-9  # of sums of times in another order
SOLVER_SLACK: Final = 1e-6


@dataclass(frozen=True)
class Least:
    """What every choice takes at least.

    Attributes:
        peak_bytes: of the whole step.
        extra_s: how much longer it takes.
        letters: actions of the layers that come to it in the relaxed problem.
    """

    peak_bytes: int
    extra_s: float
    letters: str


class Bounds:
    """Of one step; see the module."""

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator
        step = simulator.lifetimes
        self.constant = simulator.resting_bytes
        self.units = values_by_unit(step)
        self.saved = np.array([bool(value.uses) for value in step.values], dtype=bool)
        first = dict.fromkeys(range(len(step.values)), -1)
        first.update({number: position for position, number in simulator.first_wanted})
        self.first_unpacked = np.array(list(first.values()), dtype=np.int64)
        self.released = np.array(simulator.released, dtype=np.int64)
        self.until = np.array(simulator.own_ends, dtype=np.int64)
        numbers = np.arange(len(step.values))
        self.least: Levels = simulator.always + self.constant + self._without_keeping(numbers)
        copy_s = simulator.size / simulator.costs.host_bytes_per_s * simulator.costs.copy_share
        wanted = self.saved & (self.first_unpacked >= 0)
        moves = self.saved & (simulator.size >= step.least_moved_bytes)
        self.move_s = copy_s * moves + copy_s * (wanted & moves)
        self.rerun = wanted

    def _levels(self, begin: Levels, end: Levels, num_bytes: Levels) -> Levels:
        change = np.zeros(self.simulator.lifetimes.num_positions + 1, dtype=np.int64)
        lasts = end > begin
        np.add.at(change, begin[lasts], num_bytes[lasts])
        np.subtract.at(change, end[lasts], num_bytes[lasts])
        return np.cumsum(change)[:-1]

    def _without_keeping(self, numbers: Levels) -> Levels:
        """Bytes of values that are there whatever is chosen."""
        born, dies = self.simulator.born[numbers], self.simulator.dies[numbers]
        size = self.simulator.size[numbers]
        forward = self._levels(born, dies, size)
        back = np.maximum(self.first_unpacked[numbers], dies)
        is_used = self.first_unpacked[numbers] >= 0
        until = np.where(is_used, self.released[numbers], 0)
        return forward + self._levels(back, until, size)

    def keeping(self, numbers: Levels) -> Levels:
        """Bytes that are there in addition if these values are kept."""
        born, size = self.simulator.born[numbers], self.simulator.size[numbers]
        return self._levels(born, self.until[numbers], size) - self._without_keeping(numbers)

    def level(self, actions: str) -> Levels:
        """Least level at each position, for actions of values as they are settled."""
        return self.least + self.keeping(_those(actions, KEEP))

    def extra_s(self, actions: str) -> float:
        """Least extra time, for actions of values as they are settled."""
        simulator = self.simulator
        again = {simulator.ops[n] for n in _those(actions, RECOMPUTE) if self.rerun[n]}
        run_s = sum(simulator.op_s[op] for op in again)
        moved_s = float(self.move_s[_those(actions, MOVED)].sum())
        return float((run_s + moved_s) * (1 - SLACK))


def _those(actions: str, letters: str) -> Levels:
    given = np.frombuffer(actions.encode(), dtype=np.uint8)
    return np.flatnonzero(np.isin(given, list(letters.encode())))


def relaxed(bounds: Bounds, budget_bytes: int | None) -> Least | None:
    """The linear problem of the bounds, solved as a mixed-integer one.

        least  sum_u x_u,r c_u,r + x_u,o c_u,o + sum_v r_v c_v
        so that  level(p) + sum_u x_u,k k_u(p) + sum_v (x_u(v),r - r_v) k_v(p) <= budget for all p

    x chooses one action for each layer u; r_v tells that a value is made again that can only be
    if what is overwritten later is made again as well, r_v <= x_u,r and r_v <= r_w. Without a
    budget the largest level is made least. Of the positions those count that can be too high, at
    most `MAX_ROWS`; fewer only lower the bound.

    Args:
        bounds: of the step.
        budget_bytes: of the whole step; None: least peak.

    Returns:
        The bound that is proven within `MAX_NODES` nodes; None if there is no such choice.
    """
    from scipy.optimize import Bounds as Limits
    from scipy.optimize import LinearConstraint, milp

    floor = int(bounds.least.max(initial=0))
    if budget_bytes is not None and floor > budget_bytes:
        return None
    problem = _Relaxed(bounds)
    num_units, num_variables = len(bounds.units), problem.num_variables
    highest = bounds.least + problem.kept.sum(axis=0)
    largest = float(max(highest.max(initial=1), floor))
    cost = problem.cost_s.copy()
    if budget_bytes is None:
        cost[:], cost[-1] = 0.0, 1.0  # the last variable is the peak, as a share of the largest
    rows = _rows(highest, bounds.least, floor if budget_bytes is None else budget_bytes)
    memory = problem.memory(rows)
    room = np.full(len(rows), float(budget_bytes or 0))
    if budget_bytes is None:
        memory[:, -1] = -largest
    limits = [LinearConstraint(problem.one_of_each(), 1.0, 1.0)]
    if len(rows):
        top = (room - bounds.least[rows]) / largest
        limits.append(LinearConstraint(memory / largest, -np.inf, top))
    if problem.sources:
        limits.append(LinearConstraint(problem.ties(), -np.inf, 0.0))
    scale = max(float(cost.sum()), 1e-12) / 1e4  # the solver's tolerances are absolute
    found = milp(
        cost / scale,
        integrality=(np.arange(num_variables) < 3 * num_units).astype(int),
        bounds=Limits(
            np.append(np.zeros(num_variables - 1), floor / largest),
            np.ones(num_variables),
        ),
        constraints=limits,
        options={"node_limit": MAX_NODES, "mip_rel_gap": 1e-3},
    )
    if found.status == 2:  # infeasible
        return None
    proven = float(found.mip_dual_bound or 0.0) * scale * (1 - SOLVER_SLACK)
    proven = max(0.0, proven - SLACK * float(cost.sum()))
    letters = "" if found.x is None else problem.letters(found.x)
    if budget_bytes is None:
        return Least(max(floor, int(proven * largest)), 0.0, letters)
    return Least(floor, proven, letters)


class _Relaxed:
    """Coefficients: three for each layer (keep, recompute, offload), one for a delicate value.

    The last variable is the peak.
    """

    def __init__(self, bounds: Bounds) -> None:
        simulator, step = bounds.simulator, bounds.simulator.lifetimes
        self.bounds = bounds
        unit_of = [step.ops[value.op].unit for value in step.values]
        fixed = {number for number, is_fixed, _ in simulator.delicate if is_fixed}
        self.sources = {
            number: sources for number, is_fixed, sources in simulator.delicate if not is_fixed
        }
        self.delicate = list(self.sources)
        self.column = {number: i for i, number in enumerate(self.delicate)}
        self.unit_of, self.fixed = unit_of, fixed
        self.kept = np.array([bounds.keeping(np.array(n, dtype=np.int64)) for n in bounds.units])
        self.fixed_kept = [
            bounds.keeping(np.array([v for v in numbers if v in fixed], dtype=np.int64))
            if fixed.intersection(numbers)
            else None
            for numbers in bounds.units
        ]
        self.delicate_kept = [bounds.keeping(np.array([v], dtype=np.int64)) for v in self.delicate]
        n = len(bounds.units)
        self.num_variables = 3 * n + len(self.delicate) + 1
        self.cost_s = np.zeros(self.num_variables)
        charged = set()
        for number, value in enumerate(step.values):
            unit = unit_of[number]
            self.cost_s[3 * unit + 2] += bounds.move_s[number]
            if bounds.rerun[number] and number not in fixed and value.op not in charged:
                charged.add(value.op)
                at = 3 * n + self.column[number] if number in self.column else 3 * unit + 1
                self.cost_s[at] += step.ops[value.op].time_s

    def memory(self, rows: Levels) -> npt.NDArray[np.float64]:
        """Bytes of each variable at some positions."""
        n = len(self.bounds.units)
        found = np.zeros((len(rows), self.num_variables))
        found[:, 0 : 3 * n : 3] = self.kept[:, rows].T
        for unit, kept in enumerate(self.fixed_kept):
            if kept is not None:
                found[:, 3 * unit + 1] += kept[rows]
        for i, (number, kept) in enumerate(zip(self.delicate, self.delicate_kept, strict=True)):
            found[:, 3 * self.unit_of[number] + 1] += kept[rows]
            found[:, 3 * n + i] -= kept[rows]
        return found

    def one_of_each(self) -> npt.NDArray[np.float64]:
        """Rows that count the actions of each layer."""
        n = len(self.bounds.units)
        found = np.zeros((n, self.num_variables))
        for unit in range(n):
            found[unit, 3 * unit : 3 * unit + 3] = 1.0
        return found

    def ties(self) -> npt.NDArray[np.float64]:
        """Rows that say when a delicate value can be made again: r_v - x <= 0."""
        n, rows = len(self.bounds.units), []
        for i, number in enumerate(self.delicate):
            needs = [3 * self.unit_of[number] + 1]
            for source in self.sources[number]:
                if source in self.column:
                    needs.append(3 * n + self.column[source])
                elif source not in self.fixed:
                    needs.append(3 * self.unit_of[source] + 1)
                else:
                    needs.append(-1)
            for needed in needs:
                row = np.zeros(self.num_variables)
                row[3 * n + i] = 1.0
                if needed >= 0:
                    row[needed] = -1.0
                rows.append(row)
        return np.array(rows)

    def letters(self, solution: npt.NDArray[np.float64]) -> str:
        """The actions that a solution chooses."""
        picked = solution[: 3 * len(self.bounds.units)].reshape(-1, 3).argmax(axis=1)
        return "".join((KEEP + RECOMPUTE + OFFLOAD)[action] for action in picked)


def _rows(everything: Levels, least: Levels, above: int) -> Levels:
    """Positions that can be too high, the highest of each run between two changes."""
    added = everything - least
    turns = np.flatnonzero(np.diff(added)) + 1
    starts = np.concatenate([[0], turns])
    highest = np.maximum.reduceat(everything, starts)
    stops = np.append(turns, len(everything))
    wanted = np.flatnonzero(highest > above)
    if len(wanted) > MAX_ROWS:
        wanted = wanted[np.linspace(0, len(wanted) - 1, MAX_ROWS).astype(np.int64)]
    return np.array(
        [starts[i] + int(everything[starts[i] : stops[i]].argmax()) for i in wanted],
        dtype=np.int64,
    )
