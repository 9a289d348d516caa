"""Gradients that are released: the same training, bit for bit, in less memory."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from msgspec import structs
from torch.multiprocessing.reductions import StorageWeakRef

from testbed.backends.protocol import Backend, Group
from testbed.base.axes import MEMORY
from testbed.base.config import make_config
from testbed.base.errors import NonFiniteGradient, UsageError
from testbed.base.plan import Message, Plan, TensorSlice
from testbed.memory.planning.gradients import HELD_BYTES
from testbed.memory.running.arena import is_bounded, place_buckets
from testbed.memory.strategy import KEEP_ALL, Release, Strategy
from testbed.training.compressed.spec import compression_of
from testbed.training.session import Session
from tests.contracts.compressed_cases import trained
from tests.contracts.schedule_cases import by_plan
from tests.contracts.schedules import SMALL, TRAININGS, Training, plan_of
from tests.contracts.session_models import RECIPES, Recipe
from tests.harness.two_ranks import TwoLayers, on_ranks, on_two_ranks
from tests.harness.two_ranks import plan_of as model_plan_of

SCHEDULERS = ("sequential", "wfbp", "bucket", "mg-wfbp", "asc-wfbp", "dear", "p3", "pace")
SCHEDULERS = (*SCHEDULERS, "bytescheduler")
ONE, TWO = (Strategy(release=Release(n, poisons=True)) for n in (1, 2))


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.numpy().tobytes() == other.numpy().tobytes()


def train(training: Training, spec: str, strategy: Strategy, size: int = 2) -> list[Any]:
    plan = plan_of(SMALL.get(spec, spec), training, size)
    body = partial(by_plan, recipe=training.recipe, plan=plan, held_up=training.held_up)
    ranks = on_ranks(
        partial(body, strategy=strategy), size, plan.order, plan.num_channels, plan.credit_bytes
    )
    return [rank.parameters for rank in ranks]


@pytest.mark.parametrize("spec", SCHEDULERS)
@pytest.mark.parametrize("training", [t for n, t in TRAININGS.items() if n != "clipped"], ids=str)
def test_training_is_the_same_under_every_scheduler(training: Training, spec: str) -> None:
    kept = train(training, spec, KEEP_ALL)
    waits = is_bounded(plan_of(SMALL.get(spec, spec), training, 2))
    for strategy in (ONE, TWO) if waits else (TWO,):
        for rank, parameters in enumerate(train(training, spec, strategy)):
            same(parameters, kept[rank])


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.variant}, {r.dtype}")
def test_training_of_awkward_models_is_the_same(recipe: Recipe, size: int) -> None:
    training = Training(replace(recipe, steps=5, optimizer="adam"), "start-up-bound")
    for spec in ("wfbp", "bucket"):
        released = train(training, spec, TWO, size)
        for rank, parameters in enumerate(train(training, spec, KEEP_ALL, size)):
            same(released[rank], parameters)


@pytest.mark.parametrize("text", ["ef+topk:ratio=0.05", "powersgd:rank=2"])
@pytest.mark.parametrize("spec", SCHEDULERS)
def test_training_with_a_compressor_is_the_same(spec: str, text: str) -> None:
    """Two steps are compared with the true means, and the others are not."""
    recipe = Recipe("awkward", accumulate=2, steps=5)
    plan = plan_of(SMALL.get(spec, spec), Training(recipe, "bandwidth-bound"), 2)
    body = partial(trained, recipe=recipe, plan=plan, text=text, plans_anew=True, compared_steps=2)
    ends = [
        on_ranks(
            partial(body, strategy=strategy, max_channels=2),
            *(2, plan.order, max(2, plan.num_channels), plan.credit_bytes),
        )[0]
        for strategy in (KEEP_ALL, TWO)
    ]
    same(ends[0].parameters, ends[1].parameters)
    assert ends[0].relative_errors == ends[1].relative_errors
    assert ends[0].state_bytes == ends[1].state_bytes


def cut_and_fused() -> Plan:
    """Tensors that lie in two buckets, and in a bucket and a slice of their own."""
    training = Training(Recipe("plain"), "start-up-bound")
    plain = plan_of("wfbp", training, 2)
    assert plain.num_elements == (36, 6, 36, 6)
    parts = (
        (TensorSlice(3, 0, 6), TensorSlice(2, 30, 36), TensorSlice(2, 0, 10)),
        (TensorSlice(2, 10, 30), TensorSlice(1, 0, 6), TensorSlice(0, 0, 6)),
        (TensorSlice(0, 6, 20),),
        (TensorSlice(0, 20, 36),),
    )
    return structs.replace(
        plain, scheduler="mg-wfbp", messages=tuple(Message(parts=each) for each in parts)
    )


@pytest.mark.parametrize("crosses", [False, True])
@pytest.mark.parametrize("recipe", RECIPES[:3], ids=lambda r: f"{r.variant}, {r.dtype}")
def test_a_tensor_may_lie_in_several_messages(recipe: Recipe, crosses: bool) -> None:
    plan = structs.replace(
        cut_and_fused(), crosses_iteration=crosses, dtypes=(recipe.dtype,) * 4, scheduler="mg-wfbp"
    )
    body = partial(by_plan, recipe=recipe, plan=plan)
    kept, *others = (
        on_ranks(partial(body, strategy=strategy))[0].parameters
        for strategy in (KEEP_ALL, ONE, TWO)
    )
    for parameters in others:
        same(kept, parameters)


def test_halves_that_do_not_cross_the_iteration_bring_no_mean_early() -> None:
    training = Training(Recipe("complete", accumulate=2, steps=4), "bandwidth-bound")
    plan = structs.replace(
        plan_of(SMALL["dear"], training, 2), crosses_iteration=False, scheduler="mg-wfbp"
    )
    assert plan.halves
    body = partial(by_plan, recipe=training.recipe, plan=plan)
    kept, released = (on_ranks(partial(body, strategy=s))[0].parameters for s in (KEEP_ALL, ONE))
    same(kept, released)


class Branches(torch.nn.Module):
    """Two parameters whose gradients come in another order on each rank, and a third one."""

    def __init__(self) -> None:
        super().__init__()
        for name in "abc":
            self.register_parameter(name, torch.nn.Parameter(torch.ones(3)))

    def forward(self, rank: int) -> torch.Tensor:
        first, second = (self.a, self.b) if rank else (self.b, self.a)
        return (first * 2.0).sum() + (second * 3.0).sum() + self.c.sum()


def each_on_its_own_channel(order: str) -> Plan:
    return structs.replace(
        model_plan_of("wfbp", Branches()),
        messages=tuple(Message(parts=(TensorSlice(i, 0, 3),), channel=i) for i in range(3)),
        num_channels=3,
        order=order,
    )


@pytest.mark.parametrize("order", ["fifo", "priority"])
def test_ranks_never_wait_for_each_other_s_next_message(order: str) -> None:
    """One has submitted what comes second on the other, and the other way round."""
    plan = each_on_its_own_channel(order)

    def body(backend: Backend, group: Group) -> list[float]:
        model = Branches()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        with Session(*(model, optimizer, backend, group.control), plan=plan, strategy=ONE):
            for _ in range(4):
                model(group.rank).backward()
                optimizer.step()
        return [float(p.detach().mean()) for p in model.parameters()]

    ends = on_ranks(body, order=plan.order, num_channels=3)
    assert ends[0] == ends[1] == [-0.25, -0.25, 0.5]


def test_ranks_ask_for_doubtful_parameters_in_one_order() -> None:
    """`a` has a gradient of zeros on one rank, `b` on none: weight decay takes the former alone."""
    plan = each_on_its_own_channel("fifo")

    def body(backend: Backend, group: Group) -> list[float]:
        model = Branches()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.5)
        with Session(*(model, optimizer, backend, group.control), plan=plan, strategy=TWO):
            for _ in range(2):
                loss = model.c.sum() * 0.0
                (loss + (model.a * 0.0).sum() if group.rank else loss).backward()
                optimizer.step()
        return [float(p.detach().mean()) for p in model.parameters()]

    ends = on_ranks(body, num_channels=3)
    assert ends[0] == ends[1] == [0.75**2, 1.0, 0.75**2]


class Chain(torch.nn.Module):
    """Layers of different widths, so that their gradients come in one order everywhere."""

    def __init__(self, num_layers: int = 8, width: int = 8) -> None:
        super().__init__()
        widths = [width + 3 * (i % 3) for i in range(num_layers + 1)]
        layers = [torch.nn.Linear(a, b) for a, b in pairwise(widths)]
        self.layers = torch.nn.Sequential(*layers)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, std=0.02, generator=generator)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(inputs)
        return output


WIDTH = 130
WIDE = 1030  # so that a bias is freed with the weights of a layer
SOON_S = 10.0


class Watched:
    """Gradients whose memory is there, and how much of it may be."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._seen: list[tuple[StorageWeakRef, int]] = []

    def add(self, gradient: torch.Tensor) -> None:
        storage = gradient.untyped_storage()
        self._seen.append((StorageWeakRef(storage), storage.nbytes()))

    def check(self, most_bytes: int | None = None) -> None:
        """A thread that has ended a message may still be on its way out of the functions."""
        most = self._most_bytes if most_bytes is None else most_bytes
        end_s = time.monotonic() + SOON_S
        while self._alive_bytes() > most and time.monotonic() < end_s:
            time.sleep(1e-4)
        assert self._alive_bytes() <= most

    def _alive_bytes(self) -> int:
        self._seen = [one for one in self._seen if not one[0].expired()]
        return sum(num_bytes for _, num_bytes in self._seen)


@pytest.mark.parametrize("scheduler", ["wfbp", "bucket:mib=0.2,first_mib=0.1", "dear"])
@pytest.mark.parametrize(("size", "text"), [(1, "none"), (2, "none"), (2, "ef+topk:ratio=0.1")])
def test_gradients_are_freed_during_the_backward_pass(scheduler: str, size: int, text: str) -> None:
    """Looked at before the session sees the next one: whose memory is there, and what is `grad`."""
    most_bytes, width = 0, WIDTH if size > 1 else WIDE
    if size == 1:
        most_bytes = HELD_BYTES - 1
    elif scheduler == "wfbp":  # there is room for the two largest weights on their way
        most_bytes = 2 * 4 * (WIDTH + 6) ** 2

    def body(backend: Backend, group: Group) -> None:
        model = Chain(width=width)
        watched = Watched(most_bytes)

        def look(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            assert sum(p.grad is not None for p in model.parameters()) == 1
            watched.check()
            watched.add(parameter.grad)

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(look)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
        plan, compression = model_plan_of(scheduler, model), compression_of(text, 1)
        with Session(
            *(model, optimizer, backend, group.control),
            plan=plan,
            compression=compression,
            strategy=TWO,
        ) as session:
            for _ in range(3):
                model(torch.ones(2, width)).square().mean().backward()
                optimizer.step()
                session.flush()
                watched.check(0)

    on_ranks(body, size)


def test_buckets_take_turns_in_the_arena() -> None:
    """As many as may be in flight; without, each has a buffer of its own all the time."""
    held: dict[bool, int] = {}

    def body(backend: Backend, group: Group, strategy: Strategy) -> None:
        model = Chain(24)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        plan = model_plan_of("bucket:mib=0.001,first_mib=0.0005", model)
        assert len(plan.messages) > 3
        with Session(
            *(model, optimizer, backend, group.control), plan=plan, strategy=strategy
        ) as session:
            for _ in range(3):
                model(torch.ones(2, 8)).square().mean().backward()
                optimizer.step()
            held[strategy.release is not None] = sum(t.nbytes for t in session.held_tensors())
            arena = session._buckets.arena
            if strategy.release is not None:
                assert (
                    arena.num_bytes
                    == sum(t.nbytes for t in session.held_tensors())
                    == place_buckets(session.plan, 2).num_bytes
                )
                assert 0 < arena.peak_bytes <= arena.num_bytes
            assert (arena.used_bytes, arena.num_outside) == (0, 0)

    for strategy in (KEEP_ALL, TWO):
        on_ranks(partial(body, strategy=strategy))
    parameters = sum(p.nbytes for p in Chain(24).parameters())
    assert held[False] == parameters
    assert 0 < held[True] < parameters / 2


def test_buckets_beyond_the_arena_are_counted() -> None:
    """A layer whose gradient never comes keeps the messages behind it from leaving."""

    class Spared(Chain):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            for layer in self.layers[:-1]:
                inputs = layer(inputs)
            return inputs

    def body(backend: Backend, group: Group) -> None:
        model = Spared()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        start = [p.detach().clone() for p in model.layers[-1].parameters()]
        plan = model_plan_of("bucket:mib=0.001,first_mib=0.0005", model)
        with Session(
            *(model, optimizer, backend, group.control), plan=plan, strategy=TWO
        ) as session:
            model(torch.ones(2, 8)).square().mean().backward()
            optimizer.step()
            assert session._buckets.arena.used_bytes == 0
            assert session._buckets.arena.num_outside > 0
        for before, parameter in zip(start, model.layers[-1].parameters(), strict=True):
            assert torch.equal(before, parameter)

    on_ranks(body)


def test_frozen_parameters_stay() -> None:
    ends: dict[bool, list[torch.Tensor]] = {}

    def frozen() -> torch.nn.Module:
        model = TwoLayers()
        model.first.weight.requires_grad_(False)
        return model

    def loop(rank: int, model: TwoLayers, session: Session, optimizer: torch.optim.Optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.full((1, 2), 1.0 + rank)).sum().backward()
            optimizer.step()
        if rank == 0:
            is_released = session._buckets.release is not None
            ends[is_released] = [p.detach().clone() for p in model.parameters()]

    for strategy in (KEEP_ALL, TWO):
        on_two_ranks(loop, frozen, strategy=strategy)
    same(ends[False], ends[True])
    assert torch.equal(ends[True][0], torch.ones(2, 2))


@pytest.mark.parametrize("size", [1, 2])
def test_a_mean_that_is_no_number_stops_its_own_update(size: int) -> None:
    """Those of layers nearer to the loss have been taken: their means were there before."""

    class Breaking(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = TwoLayers()

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = self.layers.first(inputs)
            hidden.register_hook(lambda gradient: gradient * float("nan"))
            output: torch.Tensor = self.layers.last(hidden)
            return output

    def body(backend: Backend, group: Group) -> None:
        model = Breaking()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        session = Session(*(model, optimizer, backend, group.control), strategy=ONE)

        def step() -> None:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

        with pytest.raises(NonFiniteGradient, match=r"layers.first.weight.* has NaN .* step 0"):
            step()
        assert torch.equal(model.layers.first.weight, torch.ones(2, 2))
        # A worker that is alone updates small parameters together.
        assert torch.equal(model.layers.last.weight, torch.ones(2, 2)) == (size == 1)
        assert session.engine is None

    on_ranks(body, size)


def with_rate(rate: float, when: str) -> Any:
    def loop(rank: int, model: TwoLayers, session: Session, optimizer: torch.optim.Optimizer):
        if when == "before":
            optimizer.param_groups[0]["lr"] = rate
        model(torch.ones(1, 2)).sum().backward()
        if when == "between":
            optimizer.param_groups[0]["lr"] = rate
        optimizer.step()

    return loop


def test_a_rate_that_changes_after_backward_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'lr' was changed from 1.0 to 0.5 between"):
        on_two_ranks(with_rate(0.5, "between"), TwoLayers, strategy=TWO)
    on_two_ranks(with_rate(0.5, "before"), TwoLayers, strategy=TWO)


def test_what_needs_all_gradients_is_refused_by_the_session() -> None:
    def loop(rank: int, model: TwoLayers, session: Session, optimizer: torch.optim.Optimizer):
        model(torch.ones(1, 2)).sum().backward()
        session.synchronize()

    with pytest.raises(UsageError, match=r"synchronize.* 'release' frees each gradient"):
        on_two_ranks(loop, TwoLayers, strategy=TWO)
    with pytest.raises(UsageError, match=r"gradient scaler.* 'release' frees each gradient"):
        on_two_ranks(loop, TwoLayers, strategy=TWO, check_finite=False)


@pytest.mark.parametrize("size", [1, 2])
def test_a_second_backward_pass_is_refused(size: int) -> None:
    def body(backend: Backend, group: Group) -> None:
        model = TwoLayers()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        Session(*(model, optimizer, backend, group.control), strategy=TWO)
        model(torch.ones(1, 2)).sum().backward()
        model(torch.ones(1, 2)).sum().backward()

    with pytest.raises(UsageError, match=r"second gradient .* session.accumulating"):
        on_ranks(body, size)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"clip_norm": 1.0}, "--clip-norm needs all mean gradients at once"),
        ({"precision": "fp16", "device": "cuda"}, "gradient scaler"),
        ({"backend": "ddp"}, "'ddp' exchanges gradients by itself"),
        ({"backend": "zmq-ps:update=server"}, "update=worker"),
        ({"backend": "zmq-ps:consistency=async"}, "update=worker"),
    ],
    ids=str,
)
def test_what_cannot_go_with_it_is_refused(settings: dict[str, Any], words: str) -> None:
    release = MEMORY.resolve("release")
    with pytest.raises(UsageError, match=words):
        release.check(make_config({"memory": "release", **settings}))
    release.check(make_config({"memory": "release"}))


def test_fewer_messages_than_one_are_refused() -> None:
    with pytest.raises(UsageError, match="in_flight is 0; expected 1"):
        MEMORY.resolve("release:in_flight=0")
