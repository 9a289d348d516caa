"""Which of the machine's cores each node has; pure."""

from __future__ import annotations

from collections.abc import Sequence


def dealt(num_nodes: int, cores: Sequence[int]) -> tuple[tuple[int, ...], ...] | None:
    """The cores of each node, as many for each; None where they cannot be dealt out evenly.

    With N nodes and C cores node i has core i mod C where C divides N, so that neighbours in a ring
    are on different cores, and cores [i q, (i + 1) q) with q = floor(C / N) where C >= N; cores
    that are left over then are nobody's. Elsewhere some nodes would have more than others. Cores
    are taken by their numbers, whichever of them are threads of one physical core.

    Args:
        num_nodes: N > 0.
        cores: C > 0 numbers, in order.

    Example:
        >>> dealt(4, [0, 1]), dealt(2, [0, 1, 2, 3, 4]), dealt(3, [0, 1])
        (((0,), (1,), (0,), (1,)), ((0, 1), (2, 3)), None)
    """
    each, num_cores = len(cores) // num_nodes, len(cores)
    if each:
        return tuple(tuple(cores[i * each : (i + 1) * each]) for i in range(num_nodes))
    if num_nodes % num_cores:
        return None
    return tuple((cores[i % num_cores],) for i in range(num_nodes))
