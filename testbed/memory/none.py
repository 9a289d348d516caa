"""Memory is used as PyTorch uses it: what the other strategies are compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from testbed.base.parts import NoOptions, Part

if TYPE_CHECKING:
    import torch


def keep_all(model: torch.nn.Module, optimizer: torch.optim.Optimizer, options: NoOptions) -> None:
    """Leave the model and its optimizer as they are.

        peak bytes = P e (2 + S) + activations

    of P parameters of e bytes with S optimizer states each: parameters, gradients and states stay
    all the time, and each activation from forward until backward has used it.

    Args:
        model: that is trained.
        optimizer: of its parameters.
        options: none.

    Raises:
        UsageError: an option was given (`none:x=1`), and there is none.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> keep_all(model, torch.optim.SGD(model.parameters()), NoOptions()) is None
        True

    Reference:
        Paszke et al., 2019, NeurIPS (PyTorch). Departs: nothing.
    """


NONE = Part(name="none", summary="memory as PyTorch uses it", build=keep_all)
