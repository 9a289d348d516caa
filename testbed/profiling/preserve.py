"""Steps that leave no mark: a run that profiles itself must train as one that does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def preserved(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Afterwards buffers (batch statistics), gradients and random state are those of before.

    Parameters need no care: without an optimizer step nothing changes them.

    Args:
        model: its gradients are None inside, until a step makes some.
        device: whose random state is kept, beside the CPU's.
    """
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        forget_gradients(model)
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient


def forget_gradients(model: torch.nn.Module) -> None:
    """As `optimizer.zero_grad(set_to_none=True)`: the next step allocates them anew."""
    for parameter in model.parameters():
        parameter.grad = None
