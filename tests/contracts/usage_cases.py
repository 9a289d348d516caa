"""Wrong use, closing and losses, as cases that every rank runs."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import replace

import torch

from testbed.backends.protocol import Backend, Group
from testbed.base.axes import BACKENDS
from testbed.base.errors import RankLost, TestbedError, UsageError
from testbed.base.types import Op, Request
from tests.contracts.cases import (
    WITHIN_S,
    assert_same,
    device_of,
    do,
    integers,
    sum_of_integers,
)


def _wrong_requests(backend: Backend, device: str) -> dict[str, Request]:
    good = torch.ones(6, device=device)
    wrong = {
        "not contiguous": Request(Op.ALL_REDUCE, torch.ones(4, 4, device=device).t()),
        "sliced with a step": Request(Op.ALL_REDUCE, torch.ones(8, device=device)[::2]),
        "channel too large": Request(
            Op.ALL_REDUCE, good, channel=backend.capabilities.num_channels
        ),
        "channel negative": Request(Op.ALL_REDUCE, good, channel=-1),
        "no tensor to sum": Request(Op.ALL_REDUCE),
        "no tensor to broadcast": Request(Op.BROADCAST),
        "root too large": Request(Op.BROADCAST, good, root=backend.size),
        "root negative": Request(Op.BROADCAST, good, root=-1),
        "gather in two dimensions": Request(Op.ALL_GATHER, torch.ones(2, 2, device=device)),
        "parts to be summed": Request(Op.ALL_REDUCE, good, parts=(good,)),
        "deliver without parts": Request(Op.ALL_TO_ALL),
        "deliver of a tensor": Request(Op.ALL_TO_ALL, good, parts=(good,) * backend.size),
        "deliver to too many": Request(Op.ALL_TO_ALL, parts=(good,) * (backend.size + 1)),
        "deliver in two dimensions": Request(
            Op.ALL_TO_ALL, parts=(torch.ones(2, 2, device=device),) * backend.size
        ),
        "deliver with a step": Request(Op.ALL_TO_ALL, parts=(good[::2],) * backend.size),
        "merge by nobody": Request(Op.MERGE, good.to(torch.uint8), note="{}"),
        "dtype nobody adds": Request(Op.ALL_REDUCE, torch.ones(3, dtype=torch.complex64)),
        "tensor without memory": Request(Op.ALL_REDUCE, torch.ones(3, device="meta")),
    }
    if backend.size > 1:
        two = (good.double(), *[good] * (backend.size - 1))
        wrong["deliver of two dtypes"] = Request(Op.ALL_TO_ALL, parts=two)
    for op in set(Op) - backend.capabilities.ops:
        wrong[f"undeclared {op}"] = Request(op, good)
    return wrong


def wrong_use(backend: Backend, group: Group) -> list[str]:
    """Names of the requests that were not refused by a UsageError; the backend goes on."""
    device = device_of(backend)
    accepted = []
    for name, request in _wrong_requests(backend, device).items():
        try:
            work = backend.submit(request)
        except UsageError:
            continue
        except Exception as error:
            accepted.append(f"{name}: {type(error).__name__}: {error}")
            continue
        accepted.append(f"{name}: accepted")
        with contextlib.suppress(TestbedError):  # only that it was accepted counts
            work.wait(1.0)
    return accepted


def still_works(backend: Backend, group: Group) -> None:
    """A sum after something went wrong."""
    tensor = integers(group.rank, 1001, torch.float32).to(device_of(backend))
    do(backend, Op.ALL_REDUCE, tensor, key="after")
    assert_same(tensor, sum_of_integers(group.size, 1001, torch.float32))


def closing(backend: Backend, group: Group, spec: str, shared: bool) -> list[str]:
    """Close twice, then submit; on a backend of its own unless `shared`."""
    own = replace(group, name="to be closed")
    mine = backend if shared else BACKENDS.resolve(spec).build(own)
    tensor = integers(group.rank, 100, torch.float32).to(device_of(mine))
    do(mine, Op.ALL_REDUCE, tensor, key="before close")
    assert_same(tensor, sum_of_integers(group.size, 100, torch.float32))
    do(mine, Op.BARRIER, None, key="before close")
    mine.close(WITHIN_S)
    mine.close(WITHIN_S)
    return [_refusal(lambda: mine.submit(Request(Op.ALL_REDUCE, tensor, key="after close")))]


def _refusal(act: Callable[[], object]) -> str:
    try:
        act()
    except UsageError:
        return "UsageError"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def lose_a_rank(
    backend: Backend,
    group: Group,
    victim: int,
    midway: bool,
    as_process: bool,
    op: Op = Op.ALL_REDUCE,
) -> list[str]:
    """One rank is lost while the others are in an exchange; what each survivor was told.

    Args:
        backend: opened.
        group: the job.
        victim: who is lost.
        midway: it submits the same exchange first.
        as_process: it is killed; else it leaves with a report, as a failing thread does.
        op: SUM, or DELIVER with as many elements to each rank.
    """
    tensor = torch.ones(4_000_000, device=device_of(backend))
    request = Request(Op.ALL_REDUCE, tensor, key="weight", step=7)
    if op is Op.ALL_TO_ALL:
        request = replace(request, op=op, tensor=None, parts=(tensor,) * group.size)
    if group.rank == victim:
        if midway:
            backend.submit(request)
        if as_process:
            os.kill(os.getpid(), signal.SIGKILL)
        group.control.report_failure("it was told to leave")
        return []
    told = []
    # With the victim's part already given the first sum may succeed; the next one cannot.
    for step in (7, 8):
        try:
            backend.submit(replace(request, step=step)).wait(WITHIN_S)
        except RankLost as error:
            told.append(str(error))
    assert len(told) >= 2 - midway, told
    return told
