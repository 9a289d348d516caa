"""What every rank does for a benchmark: its own seconds of each exchange, or of each step."""

from __future__ import annotations

import itertools
import time

import torch

from testbed.backends.protocol import Backend, Group
from testbed.base.plan import Plan
from testbed.base.types import Op, Request, Result
from testbed.memory.strategy import Strategy
from testbed.training.session import Session

VERBS = {
    "all-reduce": (Op.ALL_REDUCE,),
    "fold+spread": (Op.FOLD, Op.SPREAD),
    "all-gather": (Op.ALL_GATHER,),
    "all-to-all": (Op.ALL_TO_ALL,),
    "broadcast": (Op.BROADCAST,),
    "barrier": (Op.BARRIER,),
}
FOUR_BYTES = 4


def time_verb(
    backend: Backend, group: Group, verb: str, num_bytes: int, warmup: int, rounds: int
) -> list[float]:
    """Seconds of each timed exchange after a barrier; what the last one brought is compared.

    Args:
        backend: opened.
        group: of this rank.
        verb: of `VERBS`.
        num_bytes: of the tensor; all-gather: of the result; all-to-all: of all that a rank gives.
        warmup: exchanges before.
        rounds: timed ones.
    """
    n = group.size
    count = num_bytes // FOUR_BYTES // (n if verb == "all-gather" else 1)
    tensor, result, times_s = torch.empty(count), Result(), list[float]()
    for step in range(warmup + rounds):
        tensor.fill_(group.rank + 1)
        requests = [_request(op, tensor, f"{verb}/{num_bytes}", step, n) for op in VERBS[verb]]
        meet = Request(Op.BARRIER, key=f"{verb}/{num_bytes}/begin", step=step)
        backend.submit(meet).wait()
        start_s = time.perf_counter()
        for request in requests:
            result = backend.submit(request).wait()
        times_s.append(time.perf_counter() - start_s)
    _check(verb, n, tensor, result)
    return times_s[warmup:]


def _request(op: Op, tensor: torch.Tensor, key: str, step: int, num_ranks: int) -> Request:
    if op is Op.BARRIER:
        return Request(op, key=key, step=step)
    if op is Op.ALL_TO_ALL:
        return Request(op, key=key, step=step, parts=tuple(tensor.chunk(num_ranks)))
    return Request(op, tensor, key=key, step=step)


def _check(verb: str, num_ranks: int, tensor: torch.Tensor, result: Result) -> None:
    if verb in ("all-reduce", "fold+spread"):
        assert (tensor == num_ranks * (num_ranks + 1) / 2).all()
    elif verb == "broadcast":
        assert (tensor == 1).all()
    elif verb != "barrier":
        firsts = [float(part[0]) for part in result.parts]
        assert firsts == [rank + 1.0 for rank in range(num_ranks)]


def layers(sizes: tuple[int, ...]) -> torch.nn.Sequential:
    """Linear layers of these widths: the same on all ranks."""
    torch.manual_seed(1)
    each = (torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
    return torch.nn.Sequential(*each)


def time_steps(
    backend: Backend,
    group: Group,
    plan: Plan | None,
    sizes: tuple[int, ...],
    rounds: int,
    strategy: Strategy,
) -> list[float]:
    """Seconds of each training step under a plan: forward, backward, exchange and update.

    A step lasts until the next one begins: under a plan that crosses the iteration messages of one
    go on in the other.

    Args:
        backend: opened as the plan wants it.
        group: of this rank.
        plan: of the parameters of `layers(sizes)`; None: wait-free backpropagation.
        sizes: widths.
        rounds: timed steps, after three others.
        strategy: what becomes of gradients.
    """
    model, times_s = layers(sizes), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    session = Session(model, optimizer, backend, group.control, plan=plan, strategy=strategy)
    batch = torch.randn(16, sizes[0], generator=torch.Generator().manual_seed(group.rank))
    for _ in range(3 + rounds + 1):
        times_s.append(time.perf_counter())
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    session.close()
    return [end_s - start_s for start_s, end_s in itertools.pairwise(times_s[3:])]
