"""What would train on gradients that no exchange has seen is refused, with what to do instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from testbed.base.errors import UsageError
from testbed.training.session import Session
from tests.harness.two_ranks import TwoBranches, TwoLayers, momentum, on_two_ranks

SCHEDULERS = ("wfbp", "dear", "bucket")


def backward(model: torch.nn.Module, factor: float = 1.0) -> None:
    (model(torch.ones(1, 2)).sum() * factor).backward()


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_closure_is_refused(scheduler: str) -> None:
    def loop(rank: int, model: TwoLayers, session: Session, optimizer: torch.optim.Optimizer):
        def closure() -> float:
            optimizer.zero_grad()
            backward(model)
            return 0.0

        optimizer.step(closure)

    with pytest.raises(UsageError, match=r"closure.* call backward\(\) before"):
        on_two_ranks(loop, TwoLayers, scheduler)


def clip(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def unscale(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


def replace(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 0.5


def accumulate(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad += 1.0


Change = Callable[[torch.nn.Module, torch.optim.Optimizer], None]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("change", [clip, unscale, replace, accumulate])
def test_gradients_changed_before_the_exchange_has_ended_are_refused(
    scheduler: str, change: Change
) -> None:
    def loop(rank: int, model: TwoLayers, session: Session, optimizer: torch.optim.Optimizer):
        backward(model)
        change(model, optimizer)
        optimizer.step()

    with pytest.raises(UsageError, match=r"'.*weight' was changed before .* session.synchronize"):
        on_two_ranks(loop, TwoLayers, scheduler)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_gradients_changed_in_a_later_step_are_refused(scheduler: str) -> None:
    def loop(rank: int, model: TwoLayers, session: Session, optimizer: torch.optim.Optimizer):
        for step in range(2):
            backward(model)
            if step == 1:
                clip(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(UsageError, match="was changed before"):
        on_two_ranks(loop, TwoLayers, scheduler)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_scaler_after_synchronize_trains_as_one_process(scheduler: str) -> None:
    """The second step overflows on rank 1 alone, and is skipped by both."""
    ends: list[torch.Tensor] = []

    def train(
        model: torch.nn.Module, optimizer: torch.optim.Optimizer, session: Session | None, rank: int
    ) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(4):
            optimizer.zero_grad()
            overflows = step == 1 and (session is None or rank == 1)
            loss = model(torch.ones(1, 2)).sum() * (torch.inf if overflows else 1.0)
            scaler.scale(loss).backward()
            if session is not None:
                session.synchronize()
            scaler.unscale_(optimizer)
            clip(model, optimizer)
            scaler.step(optimizer)
            scaler.update()

    def loop(rank: int, model: TwoLayers, session: Session, optimizer: torch.optim.Optimizer):
        train(model, optimizer, session, rank)
        session.flush()
        ends.append(model.first.weight.detach().clone())

    on_two_ranks(loop, TwoLayers, scheduler, check_finite=False)
    alone = TwoLayers()
    train(alone, momentum(alone), None, 0)
    assert torch.equal(ends[0], ends[1])
    torch.testing.assert_close(ends[0], alone.first.weight.detach())


def test_nan_is_no_change() -> None:
    def loop(rank: int, model: TwoLayers, session: Session, optimizer: torch.optim.Optimizer):
        backward(model, torch.nan)
        optimizer.step()

    on_two_ranks(loop, TwoLayers, check_finite=False)


def one_frozen() -> TwoLayers:
    model = TwoLayers()
    model.first.weight.requires_grad_(False)
    return model


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("synchronizes", [False, True])
def test_a_parameter_unfrozen_later_is_refused(scheduler: str, synchronizes: bool) -> None:
    def loop(rank: int, model: TwoLayers, session: Session, optimizer: torch.optim.Optimizer):
        for step in range(2):
            model.first.weight.requires_grad_(step == 1)
            backward(model)
            if synchronizes:
                session.synchronize()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(UsageError, match=r"'first.weight' has a gradient that is never exchanged"):
        on_two_ranks(loop, one_frozen, scheduler)


def test_a_parameter_that_is_not_the_models_is_refused() -> None:
    def loop(rank: int, model: TwoBranches, session: Session, optimizer: torch.optim.Optimizer):
        other = torch.nn.Parameter(torch.ones(1))
        optimizer.add_param_group({"params": [other]})
        (model.a + model.b + other).sum().backward()
        optimizer.step()

    with pytest.raises(UsageError, match=r"parameter 0 of the optimizer's group 1 has a gradient"):
        on_two_ranks(loop)
