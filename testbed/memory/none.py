"""Memory is used as PyTorch uses it: what the other strategies are compared with."""

from __future__ import annotations

from testbed.base.parts import NoOptions, Part
from testbed.memory.strategy import KEEP_ALL, Strategy


def keep_all(options: NoOptions) -> Strategy:
    """Leave the model and its optimizer as they are.

        peak bytes = P e (2 + S) + activations

    of P parameters of e bytes with S optimizer states each: parameters, gradients and states stay
    all the time, and each activation from forward until backward has used it.

    Args:
        options: none.

    Raises:
        UsageError: an option was given (`none:x=1`), and there is none.

    Example:
        >>> keep_all(NoOptions()) == KEEP_ALL
        True

    Reference:
        Paszke et al., 2019, NeurIPS (PyTorch). Departs: nothing.
    """
    return KEEP_ALL


NONE = Part(name="none", summary="memory as PyTorch uses it", build=keep_all)
