"""A session whose messages a compressor carries: its threads, its errors, what it refuses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch

from testbed.base.errors import NonFiniteGradient, RankLost, RunFailed, UsageError
from testbed.base.types import DECODE, ENCODE
from testbed.compression.casts import Dense
from testbed.compression.common import ratio_of
from testbed.compression.protocol import Context, Conversation, State
from testbed.training.compressed.spec import (
    Compression,
    compression_of,
    compressors_of,
    refuse_ratios,
)
from testbed.training.session import Session
from tests.harness.compressors import resolve_compressor
from tests.harness.two_ranks import TwoBranches, TwoLayers, on_two_ranks, plan_of

SCHEDULERS = ("wfbp", "dear", "bytescheduler")
PATIENCE_S = 20.0


@dataclass(frozen=True)
class Watched(Dense):
    """Sums, with something done before the first round and after the last."""

    before: Callable[[Context], None] = lambda context: None
    after: Callable[[Context], None] = lambda context: None

    def exchange(self, values: torch.Tensor, state: State, context: Context) -> Conversation:
        self.before(context)
        done = yield from Dense().exchange(values, state, context)
        self.after(context)
        return done


def plain(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def train(steps: int) -> Callable[..., None]:
    def loop(rank: int, model: TwoLayers, session: Session, optimizer: torch.optim.Optimizer):
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.full((1, 2), 1.0 + rank)).sum().backward()
            optimizer.step()
        session.flush()

    return loop


def run(compression: Compression | None, scheduler: str = "wfbp", steps: int = 3, **more: Any):
    options = {"optimizer_of": plain, "compression": compression, **more}
    on_two_ranks(train(steps), TwoLayers, scheduler, **options)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_session_gives_up_the_memory_of_what_it_hands_over(scheduler: str) -> None:
    """So that sparse means lie there, and residuals keep theirs from step to step."""
    given_up: list[bool] = []
    residuals: dict[tuple[int, str], set[int]] = {}

    @dataclass(frozen=True)
    class Looking(Dense):
        def exchange(self, values: torch.Tensor, state: State, context: Context) -> Conversation:
            given_up.append(context.out is values)
            done = yield from resolve_compressor("ef+topk:ratio=0.5").exchange(
                values, state, context
            )
            places = residuals.setdefault((context.rank, context.key), set())
            places.add(done.state["residual"].data_ptr())
            return done

    run(Compression("looking", Looking()), scheduler, steps=4)
    assert given_up
    assert all(given_up)
    assert {len(places) for places in residuals.values()} == {1}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_error_names_message_step_and_rank(when: str, scheduler: str) -> None:
    key = "first.weight" if scheduler == "wfbp" else ""
    found: list[str] = []

    def fail(context: Context) -> None:
        if context.step == 1 and context.rank == 1 and (not key or context.key == key):
            found.append(context.key)
            raise ValueError("the codec's table is upside down")

    with pytest.raises(RunFailed) as caught:
        run(Compression("upside-down", Watched(**{when: fail})), scheduler)
    words = str(caught.value)
    assert f"message {found[0]!r} in step 1 on rank 1" in words
    assert "'upside-down'" in words
    assert "ValueError: the codec's table is upside down" in words


def test_a_rank_that_is_lost_ends_the_others_wait() -> None:
    """Also of messages that wait for their turn behind one that will never end."""
    ended: dict[int, BaseException] = {}

    def loop(rank: int, model: TwoLayers, session: Session, optimizer: torch.optim.Optimizer):
        try:
            for step in range(3):
                if (rank, step) == (1, 1):
                    raise ArithmeticError("rank 1 gives up")
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
        except BaseException as error:
            ended[rank] = error
            raise

    with pytest.raises(ArithmeticError, match="gives up"):
        on_two_ranks(
            loop,
            TwoLayers,
            optimizer_of=plain,
            compression=compression_of("powersgd:rank=1", 1),
        )
    assert isinstance(ended[0], RankLost)
    assert "gives up" in str(ended[0])


def test_nan_is_reported_with_the_message() -> None:
    def loop(rank: int, model: TwoLayers, session: Session, optimizer: torch.optim.Optimizer):
        model(torch.full((1, 2), float("nan") if rank else 1.0)).sum().backward()
        optimizer.step()

    with pytest.raises(NonFiniteGradient, match=r"last.weight.* step 0 .*rank 1"):
        on_two_ranks(loop, TwoLayers, optimizer_of=plain, compression=compression_of("ef+topk", 1))


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_backward_does_not_wait_for_the_encoder(scheduler: str) -> None:
    """An encoder that waits until backward has ended would never end if backward waited for it."""
    ended = [threading.Event(), threading.Event()]

    def wait(context: Context) -> None:
        assert ended[context.rank].wait(PATIENCE_S)

    def loop(rank: int, model: TwoLayers, session: Session, optimizer: torch.optim.Optimizer):
        model(torch.ones(1, 2)).sum().backward()
        ended[rank].set()
        optimizer.step()
        session.flush()
        ops = [event.op for event in session.events]
        assert ops.count(ENCODE) == ops.count(DECODE) == ops.count("all-reduce")

    compression = Compression("waiting", Watched(before=wait))
    on_two_ranks(loop, TwoLayers, scheduler, optimizer_of=plain, compression=compression)


def test_the_next_message_travels_while_this_one_is_decoded() -> None:
    """A decoder that waits for the next message's exchange would never end if it came after."""
    last_left = [threading.Event(), threading.Event()]

    def note(context: Context) -> None:
        if context.key == "first.weight":
            last_left[context.rank].set()

    def wait(context: Context) -> None:
        if context.key == "last.weight":  # the first to leave
            assert last_left[context.rank].wait(PATIENCE_S)

    run(Compression("waiting", Watched(before=note, after=wait)), steps=1)


def test_momentum_of_both_kinds_is_refused() -> None:
    def momentum(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)

    with pytest.raises(UsageError, match=r"'dgc' does the momentum itself.* momentum=0"):
        run(compression_of("dgc", 1), optimizer_of=momentum)
    run(compression_of("dgc:momentum=0", 1), optimizer_of=momentum)


def test_a_gradient_scaler_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'topk' cannot stand beside a gradient scaler"):
        run(compression_of("topk", 1), check_finite=False)


def test_complex_gradients_are_refused() -> None:
    class Complex(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))

    with pytest.raises(UsageError, match=r"'turn' is torch.complex64"):
        on_two_ranks(
            lambda *ignored: None,
            Complex,
            optimizer_of=plain,
            compression=compression_of("topk", 1),
        )


def test_what_no_rank_uses_is_left_alone() -> None:
    """It has no gradient, so that weight decay does not touch it; what is used elsewhere has."""

    def decaying(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.5)

    ends: dict[int, tuple[float, float]] = {}

    def loop(rank: int, model: TwoBranches, session: Session, optimizer: torch.optim.Optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            model.a.sum().backward()
            optimizer.step()
        ends[rank] = (model.a.item(), model.b.item())

    on_two_ranks(loop, optimizer_of=decaying, compression=compression_of("ef+topk", 1))
    assert ends[0] == ends[1]
    assert ends[0][1] == 1.0
    assert ends[0][0] < 0.5


def test_a_plan_s_ratios_take_the_compressor_s_place() -> None:
    plan = plan_of("wfbp", TwoLayers())
    first, second = plan.messages
    sparse = msgspec.structs.replace(
        plan, messages=(msgspec.structs.replace(first, ratio=0.5), second)
    )
    keys = ("first to leave", "second")
    topk = compression_of("ef+topk:ratio=0.25", 1)
    assert topk is not None
    given = compressors_of(topk, sparse, keys)
    assert [ratio_of(given[key]) for key in keys] == [0.5, 0.25]
    qsgd = compression_of("qsgd", 1)
    assert qsgd is not None
    with pytest.raises(UsageError, match="'qsgd' has none"):
        compressors_of(qsgd, sparse, keys)
    with pytest.raises(UsageError, match="give --compressor with a ratio"):
        refuse_ratios(sparse)
    refuse_ratios(plan)


def test_a_state_that_is_saved_is_after_what_is_pending() -> None:
    """Under a plan that crosses the iteration the update is still pending after the step."""
    apart: list[bool] = []

    def loop(rank: int, model: TwoLayers, session: Session, optimizer: torch.optim.Optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.full((1, 2), 1.0 + rank)).sum().backward()
            optimizer.step()
            states = [session.state_dict()["compression"]["states"] for _ in range(2)]
            first = {k: v.clone() for k, v in tensors_of(states[0])}
            assert first
            session.flush()
            after = dict(tensors_of(session.state_dict()["compression"]["states"]))
            apart.append(any(not torch.equal(after[k], v) for k, v in first.items()))

    options = {"optimizer_of": plain, "compression": compression_of("ef+topk:ratio=0.5", 1)}
    on_two_ranks(loop, TwoLayers, "dear", **options)
    assert apart == [False] * 6


def tensors_of(state: Any, name: str = "") -> list[tuple[str, torch.Tensor]]:
    if isinstance(state, torch.Tensor):
        return [(name, state)]
    items = state.items() if isinstance(state, dict) else enumerate(state or ())
    held = isinstance(state, dict | list | tuple)
    return [p for k, v in items for p in tensors_of(v, f"{name}.{k}")] if held else []


def test_a_state_of_another_compressor_or_world_is_refused() -> None:
    states: dict[str, list[Any]] = {}
    refused: list[str] = []

    def saving(name: str) -> Callable[..., None]:
        def loop(rank: int, model: TwoLayers, session: Session, optimizer: torch.optim.Optimizer):
            saved, step = session.state_dict(), session.step
            states.setdefault(name, []).append(saved)
            if saved["compression"] is not None:
                kept = saved["compression"]
                elsewhere = kept | {"of": kept["of"].replace("2 ranks", "3 ranks")}
                with pytest.raises(UsageError, match="among 3 ranks and this one has"):
                    session.load_state_dict({"step": 9, "order": [], "compression": elsewhere})
            else:  # as of a framework's session
                session.load_state_dict({"step": step, "order": []})
            assert session.step == step
            for other, found in states.items():
                if other != name:
                    with pytest.raises(UsageError) as caught:
                        session.load_state_dict(found[0])
                    refused.append(f"{name} {other}: {caught.value}")

        return loop

    for name in ("none", "topk", "ef+topk"):
        compression = compression_of(name, 1)
        on_two_ranks(saving(name), TwoLayers, optimizer_of=plain, compression=compression)
    assert len(refused) == 6
    assert all("what a compressor held back fits no other" in words for words in refused)
    ours, theirs = "compressor 'topk' among 2 ranks", "no compressor"
    (first, *_) = refused
    assert f"saved under {theirs} and this one has {ours}" in first
