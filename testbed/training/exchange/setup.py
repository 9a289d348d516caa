"""Equal starts: rank 0's parameters and buffers for all ranks, and for servers that hold them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from testbed.backends.protocol import Backend, Work
from testbed.base.errors import Disagreement
from testbed.base.link import Link
from testbed.base.plan import Plan
from testbed.base.trace import Trace, TraceTensor
from testbed.base.types import Op, Request
from testbed.control.protocol import Control
from testbed.scheduling.protocol import make_plan
from testbed.training.exchange.buckets import GradientBuckets

# What ranks must agree on before the first step: a difference is an error, not a hang.

AGREE_S = 120.0


def agree_on(what: str, lines: Sequence[str], control: Control, num_workers: int) -> None:
    """Compare a list of words with all other workers.

    Raises:
        Disagreement: on every rank, naming the first that differs from rank 0 and where.
    """
    everybody = control.all_gather(
        f"agree on {what}", "\n".join(lines).encode(), AGREE_S, members=num_workers
    )
    expected = everybody[0].decode().split("\n")
    for rank, answer in enumerate(everybody):
        given = answer.decode().split("\n")
        if given != expected:
            raise Disagreement(_difference(what, rank, given, expected))


def _difference(what: str, rank: int, given: list[str], expected: list[str]) -> str:
    for position, (ours, theirs) in enumerate(zip(given, expected, strict=False)):
        if ours != theirs:
            return (
                f"{what} differ: number {position} is {ours!r} on rank {rank} and {theirs!r} on "
                "rank 0; all ranks must build the same model in the same order"
            )
    return (
        f"{what} differ: rank {rank} has {len(given)} and rank 0 has {len(expected)}; "
        "all ranks must build the same model"
    )


def share_start(model: torch.nn.Module, backend: Backend) -> None:
    """Replace every rank's parameters and buffers by rank 0's."""
    works: list[tuple[torch.Tensor, torch.Tensor, Work]] = []
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.dtype is torch.bool:
                continue  # masks are constants of the architecture
            plain = tensor.detach().clone(memory_format=torch.contiguous_format)
            request = Request(Op.BROADCAST, plain, key=f"start of {name}", step=-1)
            works.append((tensor, plain, backend.submit(request)))
        for tensor, plain, work in works:
            work.wait(AGREE_S)
            tensor.copy_(plain)


def install(buckets: GradientBuckets, backend: Backend, optimizer: str) -> None:
    """Send the parameters to the servers, laid out as the plan's messages.

    Args:
        buckets: the messages that will carry gradients there.
        backend: whose servers run the optimizer.
        optimizer: in words that the servers understand.
    """
    for key, message in zip(buckets.keys, buckets.plan.messages, strict=True):
        pieces = [
            buckets.parameters[part.tensor].detach().reshape(-1)[part.start : part.stop]
            for part in message.parts
        ]
        request = Request(Op.INSTALL, torch.cat(pieces), key=key, step=-1, note=optimizer)
        backend.submit(request).wait(AGREE_S)


# Plans for a model at hand: from a scheduler's name and the order in which gradients come.

Replan = Callable[[Sequence[str]], Plan]


def skeleton_trace(named: Sequence[tuple[str, torch.Tensor]]) -> Trace:
    """Sizes without times: all that a scheduler without a profile looks at.

    Args:
        named: parameters in forward order.
    """
    tensors = tuple(
        TraceTensor(
            name=name,
            num_elements=tensor.numel(),
            dtype=str(tensor.dtype).removeprefix("torch."),
            forward_s=0.0,
            backward_s=0.0,
        )
        for name, tensor in named
    )
    return Trace(name="sizes", device="", batch_size=1, tensors=tensors)


def replanner(
    scheduler: str, named: Sequence[tuple[str, torch.Tensor]], backend: str = ""
) -> Replan:
    """A function from the order in which gradients became ready to the scheduler's plan.

    Args:
        scheduler: specification of one that needs no times.
        named: parameters in forward order.
        backend: specification, by whose kind some schedulers choose their defaults.
    """
    tensors = dict(named)
    link = Link(backend=backend, num_workers=2, latency_s=0.0, seconds_per_byte=0.0)

    def replan(ready_order: Sequence[str]) -> Plan:
        forward = [(name, tensors[name]) for name in reversed(ready_order)]
        return make_plan(scheduler, skeleton_trace(forward), link)

    return replan
