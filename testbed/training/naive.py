"""The naive twin of the session: backward, then one blocking exchange per parameter."""

from __future__ import annotations

import torch

from testbed.backends.protocol import Backend
from testbed.nouns import Request, Verb


def average_gradients(model: torch.nn.Module, backend: Backend, step: int) -> None:
    """Replace every gradient by its mean over the workers, one after the other.

    A parameter that some rank did not use must be used by all here: the twin is plain on purpose.
    """
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad.contiguous()
            backend.submit(Request(Verb.SUM, gradient, key=name, step=step)).wait()
            parameter.grad = gradient.div_(float(backend.size))
