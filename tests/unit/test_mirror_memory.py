"""Where a mirror lies and how long gradients live beside it; checkpoints; what is refused."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from testbed.backends.protocol import Backend, Group
from testbed.base.config import RunConfig
from testbed.base.errors import UsageError
from testbed.launch.plan_options import parts_of
from testbed.memory.host import is_on_host, zeros_on_host
from testbed.memory.strategy import KEEP_ALL, Release, Strategy, combined
from testbed.training.compressed.spec import compression_of
from testbed.training.session import Session
from tests.harness.mirror_runs import (
    TOPK,
    difference,
    linear,
    mirror,
    squares,
    train,
)
from tests.harness.two_ranks import on_ranks, plan_of

CPU = torch.device("cpu")


# Memory.


def test_gradients_are_gone_when_backward_ends() -> None:
    """Those of fused messages, too: they are copied nowhere."""
    made: list[StorageWeakRef] = []
    gone: list[bool] = []

    def optimizer(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        given = list(parameters)
        for parameter in given:
            parameter.register_post_accumulate_grad_hook(
                lambda p: made.append(StorageWeakRef(p.grad.untyped_storage()))
            )
        return torch.optim.SGD(given, lr=lr)

    def look() -> None:
        gone.extend(ref.expired() for ref in made)
        made.clear()

    options: dict[str, Any] = {"optimizer": optimizer, "after_backward": look}
    for strategy in (mirror(), KEEP_ALL):
        train(strategy, linear(), squares, steps=3, scheduler="bucket", **options)
    assert gone == [True] * 12 + [False] * 12


def test_state_on_the_host_is_no_memory_of_the_process() -> None:
    """What is kept and Adam's moments lie in mapped files; with and without, they are the same."""
    kept: dict[str, list[torch.Tensor]] = {}

    def loop(where: str) -> Callable[[Backend, Group], None]:
        def rank(backend: Backend, group: Group) -> None:
            torch.manual_seed(2)
            model = nn.Linear(100, 80)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            strategy = mirror(where=where)
            if strategy.prepare is not None:
                strategy.prepare(model, optimizer)
            compression = compression_of("ef:units=update+topk", 1)
            options: dict[str, Any] = {"compression": compression, "strategy": strategy}
            with Session(model, optimizer, backend, group.control, **options) as session:
                for _ in range(3):
                    model(torch.ones(1, 100)).square().sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                assert session.engine is not None
                state = optimizer.state[model.weight]
                residual = session.engine.driver.states["weight"]["residual"]
                kept[where] = [residual, state["exp_avg"], state["exp_avg_sq"], *model.parameters()]

        return rank

    for where in ("device", "host"):
        on_ranks(loop(where), 1)
    assert [is_on_host(t, CPU) for t in kept["host"][:3]] == [True] * 3
    assert not any(is_on_host(t, CPU) for t in kept["device"][:3])
    assert all(map(torch.equal, kept["device"], kept["host"]))


def test_host_memory_is_not_anonymous_has_no_name_and_must_fit() -> None:
    code = (
        "import os, torch\n"
        "from testbed.memory.host import zeros_on_host\n"
        "def anonymous():\n"
        "    return int(open('/proc/self/status').read().split('RssAnon:')[1].split()[0])\n"
        "before, files = anonymous(), len(os.listdir('/dev/shm'))\n"
        "kept = zeros_on_host(1 << 24, torch.float32, torch.device('cpu')).fill_(1)\n"
        "print(anonymous() - before, len(os.listdir('/dev/shm')) - files)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    grown_kib, new_files = map(int, done.stdout.split())
    assert grown_kib < 1 << 13  # of the 65,536 that were written
    assert new_files == 0
    with pytest.raises(UsageError, match="there is no room"):
        zeros_on_host(1 << 50, torch.float32, CPU)


# Checkpoints, and what is refused.


def part_of_a_run(
    start: nn.Module, strategy: Strategy, scheduler: str, first: int, saved: dict[int, Any]
) -> list[torch.Tensor]:
    """Weights after 8 steps on two ranks, which go on from what was saved unless they begin."""
    ends: dict[int, list[torch.Tensor]] = {}

    def rank(backend: Backend, group: Group) -> None:
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.3)
        if strategy.prepare is not None:
            strategy.prepare(model, optimizer)
        with Session(
            *(model, optimizer, backend, group.control),
            plan=plan_of(scheduler, model),
            compression=compression_of("ef:units=update+" + TOPK, 1),
            strategy=strategy,
        ) as session:
            parts = (model, optimizer, schedule, session)
            if first:
                states = torch.load(io.BytesIO(saved[group.rank]))
                for part, state in zip(parts, states, strict=True):
                    part.load_state_dict(state)
            for step in range(first, first + 8):
                optimizer.zero_grad()
                squares(model, group.rank, step).backward()
                optimizer.step()
                schedule.step()
            file = io.BytesIO()
            torch.save([part.state_dict() for part in parts], file)
            saved[group.rank] = file.getvalue()
            ends[group.rank] = [p.detach().clone() for p in model.parameters()]

    on_ranks(rank, 2)
    return ends[0]


def resumed(start: nn.Module, strategies: Sequence[Strategy]) -> list[torch.Tensor]:
    """Weights after a run of two parts, the second by another plan."""
    saved: dict[int, Any] = {}
    part_of_a_run(start, strategies[0], "wfbp", 0, saved)
    return part_of_a_run(start, strategies[1], "bucket", 8, saved)


@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize("mirrored", [(True, True), (False, True), (True, False)])
def test_training_goes_on_from_a_checkpoint_of_either(
    mirrored: tuple[bool, bool], where: str
) -> None:
    start = linear()
    strategies = [mirror(where=where) if each else KEEP_ALL for each in mirrored]
    ours, theirs = resumed(start, strategies), resumed(start, [KEEP_ALL, KEEP_ALL])
    assert difference(ours, theirs) < 1e-12


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"compressor": "none"}, "compressor 'none' keeps no residual.* ef:units=update"),
        ({"compressor": "ef+topk"}, r"'ef\+topk' keeps it in units of gradients"),
        ({"compressor": "dgc"}, "'dgc' keeps no residual of this kind"),
        ({"compressor": "warmup+ef:units=update+topk"}, "keeps no residual of this kind"),
        ({"backend": "ddp"}, "'ddp' exchanges gradients by itself"),
        ({"clip_norm": 1.0}, "--clip-norm needs all mean gradients at once"),
        ({"memory": "mirror:form=bits"}, "form is 'bits'; expected one of difference, weights"),
    ],
)
def test_what_has_no_mirror_is_refused(given: dict[str, Any], message: str) -> None:
    settings = {"compressor": "ef:units=update+topk", "memory": "mirror", **given}
    with pytest.raises(UsageError, match=message):
        parts_of(RunConfig(**settings))


@pytest.mark.parametrize(
    ("compressor", "options", "dtype", "message"),
    [
        ("none", {}, torch.float32, "compressor 'none' keeps no residual"),
        ("topk", {}, torch.float32, "compressor 'topk' keeps no residual"),
        ("ef:units=update+topk", {"form": "weights"}, torch.bfloat16, "'weight' is torch.bfloat16"),
    ],
)
def test_a_session_refuses_the_same(
    compressor: str, options: dict[str, Any], dtype: torch.dtype, message: str
) -> None:
    def rank(backend: Backend, group: Group) -> None:
        model = nn.Linear(2, 2, dtype=dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        given: dict[str, Any] = {"compression": compression_of(compressor, 1)}
        Session(*(model, optimizer, backend, group.control), strategy=mirror(**options), **given)

    with pytest.raises(UsageError, match=message):
        on_ranks(rank, 1)


@pytest.mark.parametrize(("rate", "words"), [(0.0, "this step's is 0"), (None, "have several")])
def test_a_rate_that_updates_nothing_or_is_none_is_refused(rate: float | None, words: str) -> None:
    def optimizer(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        rates = (n if rate is None else rate for n in range(4))
        groups = [{"params": [p], "lr": r} for p, r in zip(parameters, rates, strict=True)]
        return torch.optim.SGD(groups, lr=lr)

    with pytest.raises(UsageError, match=words):
        train(mirror(), linear(), squares, steps=1, optimizer=optimizer)


def test_a_release_that_is_asked_for_takes_the_place_of_the_implied_one() -> None:
    both = [("mirror", mirror(where="host")), ("release", Strategy(release=Release(7)))]
    for chain in (both, both[::-1]):
        assert combined(chain).release == Release(7)
    assert combined(both[:1]).release == Release()
