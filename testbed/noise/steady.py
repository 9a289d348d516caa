"""Which measured steps of a run count."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

QUIET = 0.01
AT_LEAST = 4
LEAST_SHARE = 1 / 3


def quietest(stolen: Sequence[float], at_least: int = AT_LEAST) -> list[int]:
    """Indices of the measurements that count, in their order, by what the host took during each.

        stolen_i <= max(1 %, stolen_(k)),   k = max(at_least, ceil(n / 3)),   stolen_(k) k-th least

    Which they are is decided by the stolen time alone, never by what was measured; but only cores
    that have work can lose time, so that the two are not wholly independent. Where the host took
    nothing all count; where it always took much, those that lost least, disturbed as they are.

    Args:
        stolen: shares [0 .. 1] of the cores' time.
        at_least: so many count in any case, if there are as many.

    Example:
        >>> quietest([0.0, 0.2, 0.005, 0.0, 0.09, 0.0])
        [0, 2, 3, 5]
        >>> quietest([0.3, 0.1, 0.2], at_least=1)
        [1]
        >>> quietest([])
        []
    """
    if not stolen:
        return []
    least = max(at_least, math.ceil(LEAST_SHARE * len(stolen)))
    limit = max(QUIET, sorted(stolen)[min(least, len(stolen)) - 1])
    return [index for index, share in enumerate(stolen) if share <= limit]


T = TypeVar("T")


def steady_steps(
    values: Sequence[T], stolen: Sequence[float], unsteady: Sequence[bool] = ()
) -> list[T]:
    """Of steps that are like the others those that a virtual machine's host disturbed least.

    Under a plan that crosses the iteration a step ends while its messages go on. One that awaits
    its own after all, so that somebody can look at the parameters, is longer than the others, and
    the one after it finds nothing to wait for; neither tells the pace. At least four count: where
    fewer steps are steady, all steps are candidates. Of the candidates `quietest` chooses.

    Args:
        values: one for each step.
        stolen: shares [0 .. 1] of the cores' time, or empty = not known.
        unsteady: which steps are not like the others, or empty = none.

    Example:
        >>> unsteady = [True, False, False, False, False, False, True]
        >>> steady_steps([9, 1, 2, 3, 4, 5, 9], [0.0, 0.0, 0.0, 0.4, 0.0, 0.0, 0.0], unsteady)
        [1, 2, 4, 5]
        >>> steady_steps([2.0, 9.0], [], [False, True])
        [2.0, 9.0]
    """
    steps = [i for i in range(len(values)) if not (unsteady and unsteady[i])]
    if len(steps) < AT_LEAST:
        steps = list(range(len(values)))
    if stolen:
        steps = [steps[place] for place in quietest([stolen[i] for i in steps])]
    return [values[i] for i in steps]
