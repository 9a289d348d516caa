"""Which measured steps of a run count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from testbed.statistics.quiet import AT_LEAST, quietest

T = TypeVar("T")


def counted(values: Sequence[T], stolen: Sequence[float], unsteady: Sequence[bool] = ()) -> list[T]:
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
        >>> counted([9, 1, 2, 3, 4, 5, 9], [0.0, 0.0, 0.0, 0.4, 0.0, 0.0, 0.0], unsteady)
        [1, 2, 4, 5]
        >>> counted([2.0, 9.0], [], [False, True])
        [2.0, 9.0]
    """
    steps = [i for i in range(len(values)) if not (unsteady and unsteady[i])]
    if len(steps) < AT_LEAST:
        steps = list(range(len(values)))
    if stolen:
        steps = [steps[place] for place in quietest([stolen[i] for i in steps])]
    return [values[i] for i in steps]
