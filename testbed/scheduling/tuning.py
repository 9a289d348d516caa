"""One search for the knobs of any method, with a stated budget; pure.

Every method gets the same number of trials, scored by the same function. What they are scored by
and which of the best are then run is up to the caller.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final

from testbed.base.errors import UsageError
from testbed.base.knobs import Grid, Range, Space
from testbed.base.spec import parse_options, parse_spec

FIRST_WIDTH, LAST_WIDTH = 0.25, 0.03  # of a step away from the best, as a share of a knob's space
MAX_REPEATS: Final = 50  # draws that are known already, until a search gives up
APART: Final = 0.1  # of a range; of settings that are nearer to each other one is run


@dataclass(frozen=True)
class Budget:
    """What a search may spend; the same for every method.

    Attributes:
        trials: settings that the link model scores, the given one among them.
        confirm: of the best, how many are run, beside the given one; 0 = the model decides.
        steps: of such a run.
        seed: of the search.
    """

    trials: int = 30
    confirm: int = 3
    steps: int = 15
    seed: int = 1

    def __post_init__(self) -> None:
        if self.trials < 2 or self.confirm < 0 or self.steps < 1:
            raise UsageError(
                f"tune: trials is {self.trials}, confirm {self.confirm}, steps {self.steps}; "
                "expected trials of 2 or more, confirm of 0 or more and steps of 1 or more, as "
                "trials=30,confirm=3,steps=15"
            )

    def __str__(self) -> str:
        return f"trials={self.trials},confirm={self.confirm},steps={self.steps},seed={self.seed}"


def parse_budget(text: str) -> Budget:
    """A budget as `--tune` is given it.

    Raises:
        UsageError: an option that there is not, or a value that cannot be used.

    Example:
        >>> str(parse_budget("trials=40,confirm=2"))
        'trials=40,confirm=2,steps=15,seed=1'
    """
    return parse_options("tune", parse_spec(f"tune:{text}").options, Budget)


@dataclass(frozen=True)
class Trial:
    """One setting that was tried.

    Attributes:
        values: of the knobs that it sets; none: as given.
        score: smaller is better; None: it cannot be.
        why: it cannot be.
        places: in the space, by knob; none of the given setting.
    """

    values: Mapping[str, Any]
    score: float | None
    why: str = ""
    places: Mapping[str, float] = field(default_factory=dict)


def search(
    space: Space, score: Callable[[Mapping[str, Any]], float], budget: Budget
) -> list[Trial]:
    """Score settings of some knobs: the given one, half at random, half near the best.

        x_1 = as given;   then to half of the budget a Latin hypercube of the space
        then  x = best + w N(0, 1) in each knob's place, with w from 0.25 down to 0.03

    A space of fewer points than trials is scored whole. The same seed gives the same trials.

    Args:
        space: of each knob what it may be.
        score: of the values of knobs; raises UsageError where they cannot be.
        budget: its trials and seed.

    Returns:
        All trials, in the order in which they were made.

    Example:
        >>> from testbed.base.knobs import Range
        >>> from math import log
        >>> found = search({"mib": Range(1, 256)}, lambda v: abs(log(v.get("mib", 1) / 20)),
        ...                Budget(trials=20))
        >>> len(found), 15 < min(found, key=lambda t: t.score).values["mib"] < 25
        (20, True)

    Reference:
        McKay, Beckman and Conover, 1979, Technometrics (Latin hypercube); Bergstra and Bengio,
        2012, JMLR (random search). Departs: ByteScheduler, DeAR and Horovod tune by Bayesian
        optimisation while they train; this takes more trials, each without a run.
    """
    generator = random.Random(budget.seed)
    trials = [_tried({}, {}, score)]
    if (points := _whole(space, budget.trials)) is not None:
        return trials + [_tried(values, {}, score) for values in points]
    half = max(1, budget.trials // 2)
    for places in _hypercube(list(space), half, generator):
        trials.append(_tried(_values(space, places), places, score))
    known = {_key(trial.values) for trial in trials}
    repeats = 0
    while len(trials) < budget.trials and repeats < MAX_REPEATS:
        progress = (len(trials) - half) / max(1, budget.trials - half)
        width = FIRST_WIDTH * (LAST_WIDTH / FIRST_WIDTH) ** progress
        places = _near(min(trials[1:], key=_score).places, width, generator)
        values = _values(space, places)
        if _key(values) in known:
            repeats += 1
            continue
        known.add(_key(values))
        trials.append(_tried(values, places, score))
    return trials


def best_of(
    trials: Sequence[Trial], count: int, given: Mapping[str, Any], space: Space | None = None
) -> list[int]:
    """Numbers of the best trials that can be, each setting once, and of the given one.

    Settings that differ in ranges alone, and by less than a tenth of each, are taken for one while
    there are others: what the model does not know is tried by runs, which near ones would take up.

    Args:
        trials: the given setting first.
        count: of the best.
        given: each knob's value in the given setting; a trial that sets it is the same setting.
        space: that was searched; None: its knobs have no ranges.

    Example:
        >>> trials = [Trial({}, 3.0), Trial({"k": 1}, 2.0), Trial({"k": 2}, 1.0)]
        >>> best_of(trials, 1, {"k": 4}), best_of([*trials, trials[2]], 2, {"k": 4})
        ([2, 0], [2, 1, 0])
        >>> from testbed.base.knobs import Range
        >>> some = [Trial({}, 9), *(Trial({"k": k}, k, places={"k": k}) for k in (0.3, 0.31, 0.5))]
        >>> best_of(some, 2, {"k": 1}, {"k": Range(0.1, 9)})
        [1, 3, 0]
    """
    order = sorted(
        (n for n, t in enumerate(trials) if t.score is not None),
        key=lambda n: (_score(trials[n]), n),
    )
    once: dict[tuple[tuple[str, Any], ...], int] = {}
    for n in order:
        once.setdefault(_key({**given, **trials[n].values}), n)
    ranges = {name for name, knob in (space or {}).items() if isinstance(knob, Range)}
    ranked, apart = list(once.values()), list[int]()
    for n in ranked:  # the given one is run beside them, unless it is the best
        near = any(_near_in(ranges, trials[n], trials[other]) for other in apart)
        apart += [] if near or (n == 0 and apart) else [n]
    best = [*apart, *(n for n in ranked if n not in apart)][:count]
    best.sort(key=ranked.index)
    return best if 0 in best or trials[0].score is None else [*best, 0]


def _tried(
    values: Mapping[str, Any],
    places: Mapping[str, float],
    score: Callable[[Mapping[str, Any]], float],
) -> Trial:
    try:
        return Trial(values, score(values), places=places)
    except UsageError as error:
        return Trial(values, None, str(error), places)


def _score(trial: Trial) -> float:
    return inf if trial.score is None else trial.score


def _whole(space: Space, trials: int) -> list[dict[str, Any]] | None:
    """All points of a space that has fewer than there are trials."""
    grids = [knob.values for knob in space.values() if isinstance(knob, Grid)]
    if len(grids) < len(space):
        return None
    points = [dict(zip(space, values, strict=True)) for values in itertools.product(*grids)]
    return points if len(points) < trials else None


def _hypercube(
    names: Sequence[str], count: int, generator: random.Random
) -> list[dict[str, float]]:
    """Places of which each knob has one in every `count`-th of its space."""
    columns = {}
    for name in names:
        strata = list(range(count))
        generator.shuffle(strata)
        columns[name] = [(stratum + generator.random()) / count for stratum in strata]
    return [{name: columns[name][row] for name in names} for row in range(count)]


def _near_in(ranges: set[str], one: Trial, other: Trial) -> bool:
    if not (one.places and other.places):
        return False
    return all(
        abs(one.places[name] - other.places[name]) < APART
        if name in ranges
        else one.values[name] == other.values[name]
        for name in one.places
    )


def _near(places: Mapping[str, float], width: float, generator: random.Random) -> dict[str, float]:
    below_one = 1 - 1e-9
    return {
        name: min(max(place + width * generator.gauss(0, 1), 0.0), below_one)
        for name, place in places.items()
    }


def _values(space: Space, places: Mapping[str, float]) -> dict[str, Any]:
    return {name: space[name].at(place) for name, place in places.items()}


def _key(values: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(values.items()))
