"""From sums to means, and what is wrong with a mean."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from testbed.errors import NonFiniteGradient


def divide(sums: Sequence[torch.Tensor], num_workers: int) -> None:
    """Turn sums over the workers into means, in place."""
    if num_workers > 1 and sums:
        torch._foreach_div_(list(sums), float(num_workers))


def norms_of(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Euclidean norms, in one pass over the memory; waits once for each device, not each tensor.

    Example:
        >>> norms_of([torch.tensor([3.0, 4.0]), torch.zeros(2), torch.empty(0)])
        [5.0, 0.0, 0.0]
    """
    norms = torch._foreach_norm(list(tensors)) if tensors else ()
    by_device: dict[torch.device, list[int]] = {}
    for position, norm in enumerate(norms):
        by_device.setdefault(norm.device, []).append(position)
    found = [0.0] * len(tensors)
    for positions in by_device.values():
        together = torch.stack([norms[position] for position in positions])
        for position, value in zip(positions, together.tolist(), strict=True):
            found[position] = value
    return found


def silent(tensors: Sequence[torch.Tensor], norms: Sequence[float]) -> list[int]:
    """Positions of tensors that are zero everywhere (and have elements at all).

    Args:
        tensors: to look at.
        norms: of each, from `norms_of`.
    """
    pairs = zip(tensors, norms, strict=True)
    return [i for i, (tensor, norm) in enumerate(pairs) if tensor.numel() and norm == 0.0]


def refuse_non_finite(
    names: Sequence[str],
    tensors: Sequence[torch.Tensor],
    norms: Sequence[float],
    step: int,
    what: str = "gradient",
) -> None:
    """Look for NaN and infinity.

    A norm is finite only if all elements are; only where it is not are the elements looked at (a
    norm of finite numbers may overflow).

    Args:
        names: of the tensors.
        tensors: to look at.
        norms: of each, from `norms_of`.
        step: for the message, as is `what`.
        what: the tensors are.

    Raises:
        NonFiniteGradient: names the tensor and the step.
    """
    for name, tensor, norm in zip(names, tensors, norms, strict=True):
        if math.isfinite(norm) or bool(torch.isfinite(tensor).all()):
            continue
        bad = "NaN" if bool(torch.isnan(tensor).any()) else "infinite values"
        raise NonFiniteGradient(
            f"{what} of {name!r} has {bad} after the exchange of step {step}; expected finite "
            "numbers; lower the learning rate or clip with --clip-norm"
        )
