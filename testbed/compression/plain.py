"""Plain twins of the fast selection: short, obvious, slow; tests and the benchmark compare."""

from __future__ import annotations

import torch


def largest_plainly(values: torch.Tensor, count: int) -> torch.Tensor:
    """Ascending indices of the `count` largest magnitudes; ties: lower index.

    Example:
        >>> largest_plainly(torch.tensor([1.0, -3.0, 3.0, 3.0]), 2).tolist()
        [1, 2]
    """
    order = torch.argsort(values.abs(), descending=True, stable=True)
    return order[:count].sort().values


def above_plainly(values: torch.Tensor, threshold: float) -> torch.Tensor:
    """Ascending indices of all |value| >= threshold.

    Example:
        >>> above_plainly(torch.tensor([1.0, -3.0, 2.0]), 2.0).tolist()
        [1, 2]
    """
    return (values.abs() >= threshold).nonzero().view(-1)
