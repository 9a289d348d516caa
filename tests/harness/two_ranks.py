"""Two ranks of a session as two threads of this process, and the small models they train."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from testbed.backends.loopback import LOOPBACK
from testbed.backends.protocol import Group
from testbed.base.link import Link
from testbed.base.plan import Plan
from testbed.control.inproc import InprocHub
from testbed.scheduling.protocol import make_plan
from testbed.training.exchange.setup import skeleton_trace
from testbed.training.session import Session

WAIT_S = 30.0


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


def on_two_ranks(
    body: Callable[[int, Any, Session, torch.optim.Optimizer], None],
    build: Callable[[], torch.nn.Module] = TwoBranches,
    scheduler: str = "wfbp",
    optimizer_of: Callable[[torch.nn.Module], torch.optim.Optimizer] = momentum,
    **options: Any,
) -> None:
    """Run a training loop on two threads; the first exception of either is raised here."""
    hub = InprocHub(2)
    errors: list[BaseException] = []

    def rank(number: int) -> None:
        model = build()
        optimizer = optimizer_of(model)
        plan = plan_of(scheduler, model)
        member = hub.member(number)
        group = Group(number, 2, member, deadline_s=WAIT_S, order=plan.order)
        backend = LOOPBACK.build(group, LOOPBACK.options())
        try:
            with Session(model, optimizer, backend, group.control, plan=plan, **options) as session:
                body(number, model, session, optimizer)
        except BaseException as error:
            errors.append(error)
            group.control.report_failure(str(error))
        backend.close()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
