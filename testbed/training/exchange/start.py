"""Equal starts: rank 0's parameters and buffers for all ranks, and for servers that hold them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from testbed.backends.protocol import Backend, Work
from testbed.nouns import Request, Verb
from testbed.scheduling.plan import Plan
from testbed.training.agreement import AGREE_S


def share_start(model: torch.nn.Module, backend: Backend) -> None:
    """Replace every rank's parameters and buffers by rank 0's."""
    works: list[tuple[torch.Tensor, torch.Tensor, Work]] = []
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.dtype is torch.bool:
                continue  # masks are constants of the architecture
            plain = tensor.detach().clone(memory_format=torch.contiguous_format)
            request = Request(Verb.BROADCAST, plain, key=f"start of {name}", step=-1)
            works.append((tensor, plain, backend.submit(request)))
        for tensor, plain, work in works:
            work.wait(AGREE_S)
            tensor.copy_(plain)


def install(
    plan: Plan,
    parameters: Sequence[torch.Tensor],
    keys: Sequence[str],
    backend: Backend,
    note: str,
) -> None:
    """Give the servers the parameters, laid out as the plan's messages.

    Args:
        plan: whose messages will carry gradients there.
        parameters: in the plan's order.
        keys: name of each message.
        backend: whose servers run the optimizer.
        note: the optimizer in words.
    """
    for number, message in enumerate(plan.messages):
        pieces = [
            parameters[part.tensor].detach().reshape(-1)[part.start : part.stop]
            for part in message.parts
        ]
        values = torch.cat(pieces)
        backend.submit(Request(Verb.INSTALL, values, key=keys[number], step=-1, note=note)).wait(
            AGREE_S
        )
