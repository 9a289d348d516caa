"""Training with a compressor, as a case that every rank runs, and the same in one thread."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from testbed.backends.protocol import Backend, Group
from testbed.base.config import RunConfig
from testbed.base.plan import Plan
from testbed.base.types import Op
from testbed.compression.lockstep import Lockstep
from testbed.memory.strategy import KEEP_ALL, Strategy
from testbed.scheduling.protocol import needs_profile
from testbed.scheduling.under_compressor import overlapped
from testbed.training.compressed.engine import shapes_of
from testbed.training.compressed.spec import Compression, compression_of, compressors_of
from testbed.training.compressed.work import Costs
from testbed.training.exchange.buckets import describe_messages
from testbed.training.exchange.setup import replanner
from testbed.training.protocol import Run
from testbed.training.session import Session
from testbed.training.summary import Outcome
from testbed.training.trainer import train
from tests.contracts.cases import meet
from tests.contracts.memory_cases import awkward
from tests.contracts.schedule_cases import _holder
from tests.contracts.session_models import Recipe, build, losses, parameters_of
from tests.harness.compressors import resolve_compressor

SEED = 7
EXCHANGES = (Op.ALL_REDUCE, Op.ALL_GATHER, Op.ALL_TO_ALL, Op.MERGE)


@dataclass(frozen=True)
class Compressed:
    """What one rank brings back.

    Attributes:
        parameters: after the last step.
        requests: for each channel the keys and steps of what it exchanged, in that order.
        costs: of all steps.
        state_bytes: kept in the end.
        relative_errors: of the compared steps.
    """

    parameters: list[torch.Tensor]
    requests: dict[int, list[tuple[str, str, int]]]
    costs: Costs
    state_bytes: int
    relative_errors: list[float]


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.01)


def trained(
    backend: Backend,
    group: Group,
    recipe: Recipe,
    plan: Plan,
    text: str,
    held_up: bool = False,
    plans_anew: bool = False,
    compared_steps: int = 0,
    max_channels: int = 1,
    strategy: Strategy = KEEP_ALL,
) -> Compressed:
    """Train with a compressor; `none` takes the path without one."""
    model = build(recipe, seed=0).to(group.device)
    optimizer = optimizer_of(model)
    replan = None
    if plans_anew and not needs_profile(plan.scheduler):
        replan = replanner(plan.scheduler, list(model.named_parameters()))
    plan, replan = overlapped(plan, replan, max_channels)
    compression = compression_of(text, SEED, compared_steps)
    session = Session(
        *(model, optimizer, backend, group.control),
        plan=plan,
        replan=replan,
        compression=compression,
        strategy=strategy,
    )
    if held_up:
        hold = _holder(group.rank)
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: hold())
    requests: dict[int, list[tuple[str, str, int]]] = {}
    with session:
        for step in range(recipe.steps):
            optimizer.zero_grad(set_to_none=True)
            *early, last = losses(recipe, model, group.rank, step)
            with session.accumulating():
                for loss in early:
                    loss.backward()  # type: ignore[no-untyped-call]
            last.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            for event in sorted(session.events, key=lambda event: event.started_s):
                if event.op in EXCHANGES:
                    told = (event.op, event.key, event.step)
                    requests.setdefault(event.channel, []).append(told)
    meet(group, "trained with a compressor")
    engine = session.engine
    if engine is None:
        return Compressed(parameters_of(model), requests, Costs(), 0, [])
    return Compressed(
        parameters_of(model),
        requests,
        sum(engine.driver.costs.values(), Costs()),
        engine.driver.state_bytes,
        engine.probe.relative_errors,
    )


def through_trainer(
    backend: Backend, group: Group, plan: Plan, config: RunConfig, max_channels: int
) -> Outcome:
    """What a run of the trainer brings home that is compared with one process."""
    build = functools.partial(awkward, 0, 0.0)
    workload = build()
    replan = replanner(config.scheduler, list(workload.model.named_parameters()))
    _, replan = overlapped(plan, replan, max_channels)
    outcome = train(Run(config, backend, group.control, build, plan, replan), workload)
    meet(group, "trained by the trainer")
    return outcome


def in_one_thread(recipe: Recipe, plan: Plan, text: str, num_workers: int) -> list[torch.Tensor]:
    """The parameters after the same training, with the reference driver of conversations."""
    model = build(recipe, seed=0)
    optimizer = optimizer_of(model)
    named = dict(model.named_parameters())
    tensors = [named[name] for name in plan.names]
    keys = describe_messages(plan)
    compressors = compressors_of(Compression(text, resolve_compressor(text)), plan, keys)
    jobs = [
        Lockstep(compressors[key], num_workers, seed=SEED, shapes=shapes, key=key)
        for shapes, key in zip(shapes_of(plan, tensors), keys, strict=True)
    ]
    for step in range(recipe.steps):
        given = []
        for rank in range(num_workers):
            optimizer.zero_grad(set_to_none=True)
            for loss in losses(recipe, model, rank, step):
                loss.backward()  # type: ignore[no-untyped-call]
            given.append([t.grad.view(-1) for t in tensors if t.grad is not None])
        means = [torch.zeros_like(gradient) for gradient in given[0]]
        for job, message in zip(jobs, plan.messages, strict=True):
            values = [
                torch.cat([gradients[p.tensor][p.start : p.stop] for p in message.parts])
                for gradients in given
            ]
            (mean, *_) = [done.mean for done in job.exchange(values, learning_rate=0.05)]
            offset = 0
            for part in message.parts:
                length = part.stop - part.start
                means[part.tensor][part.start : part.stop] = mean[offset : offset + length]
                offset += length
        for tensor, mean in zip(tensors, means, strict=True):
            tensor.grad = mean.view_as(tensor)
        optimizer.step()
    return parameters_of(model)
