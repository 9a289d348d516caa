"""One cell against another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def efficiency(bound_s: float | None, time_s: float | None) -> float | None:
    """Share of the speed without any communication that is left with it.

        efficiency = bound_s / time_s

    Args:
        bound_s: step time of the same work on the backend `none`, in seconds.
        time_s: step time with communication, in seconds.

    Returns:
        A fraction; above 1 where noise made the bound the slower one; None if a time is unknown.

    Example:
        >>> efficiency(0.9, 1.0)
        0.9
    """
    if bound_s is None or time_s is None or not time_s > 0:
        return None
    return bound_s / time_s


def most_common(values: Sequence[str]) -> str:
    """The value that most cells share; of equally many the first; empty ones do not count.

    Example:
        >>> most_common(["a", "b", "b", ""])
        'b'
    """
    counts = Counter(value for value in values if value)
    return counts.most_common(1)[0][0] if counts else ""
