"""Training by a plan, as a case that every rank runs; ranks can be held up at random."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

import torch

from testbed.backends.protocol import Backend, Group
from testbed.base.errors import UsageError
from testbed.base.plan import Plan
from testbed.base.types import Event
from testbed.memory.strategy import KEEP_ALL, Strategy
from testbed.scheduling.protocol import needs_profile
from testbed.training.exchange.setup import replanner
from testbed.training.exchange.unused import KEY
from testbed.training.session import Session
from tests.contracts.cases import meet
from tests.contracts.session_models import (
    Recipe,
    build,
    clip,
    losses,
    optimizer_of,
    parameters_of,
    schedule_of,
)

LONGEST_HOLD_S = 0.003


@dataclass(frozen=True)
class Trained:
    """What one rank brings back.

    Attributes:
        parameters: after the last step.
        exchanges: for each step and channel what this rank began, in that order.
    """

    parameters: list[torch.Tensor]
    exchanges: list[dict[int, list[tuple[str, str, int]]]]


def by_plan(
    backend: Backend,
    group: Group,
    recipe: Recipe,
    plan: Plan,
    held_up: bool = False,
    strategy: Strategy = KEEP_ALL,
) -> Trained:
    """Train as a run does: a scheduler without a profile plans anew after the first step."""
    model = build(recipe, seed=group.rank).to(group.device)
    optimizer = optimizer_of(recipe, model)
    schedule = schedule_of(recipe, optimizer)
    named = list(model.named_parameters())
    replan = None if needs_profile(plan.scheduler) else replanner(plan.scheduler, named)
    session = Session(
        *(model, optimizer, backend, group.control), plan=plan, replan=replan, strategy=strategy
    )
    hold = _holder(group.rank) if held_up else None
    if hold is not None:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: hold())
    exchanges = []
    for step in range(recipe.steps):
        optimizer.zero_grad(set_to_none=True)
        *early, last = losses(recipe, model, group.rank, step)
        with session.accumulating():
            for loss in early:
                loss.backward()  # type: ignore[no-untyped-call]
        last.backward()  # type: ignore[no-untyped-call]
        if recipe.max_norm is not None:
            session.synchronize()
            clip(recipe, model)
        optimizer.step()
        schedule.step()
        exchanges.append(_by_channel(session.events))
        if hold is not None:
            hold()
    session.close()
    meet(group, "trained by a plan")
    return Trained(parameters_of(model), exchanges)


def _holder(rank: int) -> Any:
    """Sleeps for a while that differs from call to call and from rank to rank."""
    generator = random.Random(rank)

    def hold() -> None:
        time.sleep(generator.uniform(0.0, LONGEST_HOLD_S))

    return hold


def _by_channel(events: list[Event]) -> dict[int, list[tuple[str, str, int]]]:
    channels: dict[int, list[tuple[str, str, int]]] = {}
    for event in sorted(events, key=lambda event: event.started_s):
        if event.key != KEY:  # votes are waited for only where they are needed
            channels.setdefault(event.channel, []).append((event.op, event.key, event.num_bytes))
    return channels


def refusal(backend: Backend, group: Group, recipe: Recipe, plan: Plan) -> str:
    """What the session says to a plan or model that it cannot train with."""
    model = build(recipe, seed=0).to(group.device)
    optimizer = optimizer_of(recipe, model)
    try:
        session = Session(model, optimizer, backend, group.control, plan=plan)
        for loss in losses(recipe, model, group.rank, 0):
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    except UsageError as error:
        words = str(error)
    else:
        session.close()
        words = "accepted"
    meet(group, "refused")
    return words
