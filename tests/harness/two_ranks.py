"""Two ranks of a session as two threads of this process, and the small models they train."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from testbed.backends.loopback import LOOPBACK
from testbed.backends.protocol import Backend, Group, Order
from testbed.base.link import Link
from testbed.base.plan import Plan
from testbed.control.inproc import InprocHub
from testbed.scheduling.protocol import make_plan
from testbed.training.exchange.setup import skeleton_trace
from testbed.training.session import Session

WAIT_S = 30.0
T = TypeVar("T")


class TwoBranches(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.tensor([1.0]))
        self.b = torch.nn.Parameter(torch.tensor([1.0]))


class TwoLayers(torch.nn.Module):
    """Called layers; weights are ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(2, 2, bias=False)
        self.last = torch.nn.Linear(2, 2, bias=False)
        for parameter in self.parameters():
            torch.nn.init.ones_(parameter)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(self.first(inputs))
        return output


def plan_of(scheduler: str, model: torch.nn.Module) -> Plan:
    link = Link(backend="", num_workers=2, latency_s=0.0, seconds_per_byte=0.0)
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return make_plan(scheduler, skeleton_trace(named), link)


def momentum(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)


def on_ranks(
    body: Callable[[Backend, Group], T],
    size: int = 2,
    order: Order = "fifo",
    num_channels: int = 1,
    credit_bytes: int | None = None,
) -> list[T]:
    """What threads of this process return, in rank order; the first exception is raised here."""
    hub = InprocHub(size)
    errors: list[BaseException] = []
    returned: dict[int, T] = {}

    def rank(number: int) -> None:
        group = Group(
            *(number, size, hub.member(number)),
            deadline_s=WAIT_S,
            order=order,
            num_channels=num_channels,
            credit_bytes=credit_bytes,
        )
        backend = LOOPBACK.build(group, LOOPBACK.options())
        try:
            returned[number] = body(backend, group)
        except BaseException as error:
            errors.append(error)
            group.control.report_failure(str(error))
        backend.close()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [returned[number] for number in range(size)]


def on_two_ranks(
    body: Callable[[int, Any, Session, torch.optim.Optimizer], None],
    build: Callable[[], torch.nn.Module] = TwoBranches,
    scheduler: str = "wfbp",
    optimizer_of: Callable[[torch.nn.Module], torch.optim.Optimizer] = momentum,
    **options: Any,
) -> None:
    """Run a training loop on two threads; the first exception of either is raised here."""

    def rank(backend: Backend, group: Group) -> None:
        model = build()
        optimizer = optimizer_of(model)
        plan = plan_of(scheduler, model)
        with Session(model, optimizer, backend, group.control, plan=plan, **options) as session:
            body(group.rank, model, session, optimizer)

    on_ranks(rank, order=plan_of(scheduler, build()).order)
