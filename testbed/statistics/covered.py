"""How much time several spans cover together."""

from __future__ import annotations

from collections.abc import Iterable


def covered_s(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of spans, seconds: where several run at once, time counts once.

    Args:
        spans: beginning and end of each, in any order.

    Example:
        >>> covered_s([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0)])
        4.0
    """
    busy_s, until_s = 0.0, float("-inf")
    for begun_s, ended_s in sorted(spans):
        busy_s += max(0.0, ended_s - max(begun_s, until_s))
        until_s = max(until_s, ended_s)
    return busy_s
