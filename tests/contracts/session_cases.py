"""Training through the session and through its naive twin, as cases that every rank runs."""

from __future__ import annotations

import torch

from testbed.backends.protocol import Backend, Group
from testbed.base.errors import Disagreement
from testbed.training.reference import average_gradients
from testbed.training.session import Session
from tests.contracts.cases import meet
from tests.contracts.session_models import (
    DIFFERENT,
    Recipe,
    build,
    clip,
    losses,
    optimizer_of,
    parameters_of,
    schedule_of,
)


def by_session(backend: Backend, group: Group, recipe: Recipe) -> list[torch.Tensor]:
    """Parameters after training; rank 0's start must replace those of all others."""
    model = build(recipe, seed=group.rank).to(group.device)
    optimizer = optimizer_of(recipe, model)
    session = Session(model, optimizer, backend, group.control)
    for step in range(recipe.steps):
        optimizer.zero_grad(set_to_none=True)
        *early, last = losses(recipe, model, group.rank, step)
        with session.accumulating():
            for loss in early:
                loss.backward()  # type: ignore[no-untyped-call]
        last.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    session.close()
    meet(group, "trained by session")
    return parameters_of(model)


def by_naive_twin(backend: Backend, group: Group, recipe: Recipe) -> list[torch.Tensor]:
    """The same, one blocking exchange after the other; all ranks start from rank 0's weights."""
    model = build(recipe, seed=0).to(group.device)
    optimizer = optimizer_of(recipe, model)
    schedule = schedule_of(recipe, optimizer)
    for step in range(recipe.steps):
        optimizer.zero_grad(set_to_none=True)
        for loss in losses(recipe, model, group.rank, step):
            loss.backward()  # type: ignore[no-untyped-call]
        average_gradients(model, backend, step)
        clip(recipe, model)
        optimizer.step()
        schedule.step()
    meet(group, "trained by the twin")
    return parameters_of(model)


def different_models(backend: Backend, group: Group, what: str) -> str:
    """What the session says when rank 1's model is another one."""
    model = DIFFERENT[what](int(group.rank == 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = parameters_of(model)
    try:
        Session(model, optimizer, backend, group.control)
    except Disagreement as error:
        after = parameters_of(model)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        return str(error)
    return "accepted"
