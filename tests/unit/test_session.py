"""What a session does with gradients that do not come in the last backward pass."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from testbed.backends.loopback import LOOPBACK
from testbed.backends.protocol import Group
from testbed.control.inproc import InprocHub
from testbed.errors import UsageError
from testbed.training.session import Session

WAIT_S = 30.0


class TwoBranches(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.tensor([1.0]))
        self.b = torch.nn.Parameter(torch.tensor([1.0]))


def on_two_ranks(body: Callable[[int, TwoBranches, Session, torch.optim.Optimizer], None]) -> None:
    """Run a training loop on two threads; the first exception of either is raised here."""
    hub = InprocHub(2)
    errors: list[BaseException] = []

    def rank(number: int) -> None:
        group = Group(number, 2, hub.member(number), deadline_s=WAIT_S)
        backend = LOOPBACK.open(group, LOOPBACK.options())
        model = TwoBranches()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        session = Session(model, optimizer, backend, group.control)
        try:
            body(number, model, session, optimizer)
            session.close()
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


def test_a_parameter_used_only_in_an_earlier_micro_batch_keeps_its_gradient() -> None:
    ends: dict[int, tuple[float, float]] = {}

    def loop(rank: int, model: TwoBranches, session: Session, optimizer: torch.optim.Optimizer):
        for _ in range(2):  # the second step has learned the order of the first
            with session.accumulating():
                (model.a + model.b).sum().backward()
            model.a.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends[rank] = (model.a.item(), model.b.item())

    on_two_ranks(loop)
    assert ends[0] == ends[1] == (1.0 - 2 * 2, 1.0 - 2 * 1)


def test_a_second_backward_pass_before_the_step_is_refused() -> None:
    def loop(rank: int, model: TwoBranches, session: Session, optimizer: torch.optim.Optimizer):
        (model.a + model.b).sum().backward()
        (model.a + model.b).sum().backward()

    with pytest.raises(UsageError, match=r"second gradient .* session.accumulating"):
        on_two_ranks(loop)
