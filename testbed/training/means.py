"""From sums to means, and what is wrong with a mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from testbed.errors import NonFiniteGradient


def divide(sums: Sequence[torch.Tensor], num_workers: int) -> None:
    """Turn sums over the workers into means, in place."""
    if num_workers > 1 and sums:
        torch._foreach_div_(list(sums), float(num_workers))


def silent(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Positions of tensors that are zero everywhere (and have elements at all)."""
    norms = torch._foreach_norm(list(tensors)) if tensors else ()
    return [
        i for i, (t, n) in enumerate(zip(tensors, norms, strict=True)) if t.numel() and n == 0.0
    ]


def refuse_non_finite(
    names: Sequence[str], tensors: Sequence[torch.Tensor], step: int, what: str = "gradient"
) -> None:
    """Look for NaN and infinity.

    One pass over the memory: a norm is finite only if all elements are; only where it is not are
    the elements looked at (a norm of finite numbers may overflow).

    Raises:
        NonFiniteGradient: names the tensor and the step.
    """
    norms = torch._foreach_norm(list(tensors)) if tensors else ()
    for name, tensor, norm in zip(names, tensors, norms, strict=True):
        if bool(torch.isfinite(norm)) or bool(torch.isfinite(tensor).all()):
            continue
        bad = "NaN" if bool(torch.isnan(tensor).any()) else "infinite values"
        raise NonFiniteGradient(
            f"{what} of {name!r} has {bad} after the exchange of step {step}; expected finite "
            "numbers; lower the learning rate or clip with --clip-norm"
        )
