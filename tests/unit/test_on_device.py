"""What concerns a GPU and can be told without one: its clock, its random numbers, its number."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from testbed.backends.loopback import LOOPBACK
from testbed.backends.protocol import Group
from testbed.backends.torch_groups import nccl
from testbed.base.config import RunConfig
from testbed.base.errors import Unavailable, UsageError
from testbed.base.types import Op, Request
from testbed.control.inproc import InprocHub
from testbed.launch import worker
from testbed.launch.lifecycle import place_device
from testbed.records.cell import Cell
from testbed.training.exchange import step_state
from testbed.training.exchange.step_state import StepState
from testbed.training.replica import random_state, set_random_state

CUDA = torch.device("cuda:1")


class Moment:
    """A moment of a GPU that has a clock of its own."""

    def __init__(self, at_s: float) -> None:
        self.at_s, self.has_come = at_s, False

    def synchronize(self) -> None:
        self.has_come = True

    def elapsed_time(self, later: Moment) -> float:
        assert later.has_come
        return 1e3 * (later.at_s - self.at_s)


def test_exposed_time_is_the_device_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits for compute that it has queued, too; the GPU only for the message."""
    moments = iter([Moment(0.20), Moment(0.25), Moment(0.30), Moment(0.30)])
    monkeypatch.setattr(step_state, "now_on", lambda device: next(moments))
    control = InprocHub(1).member(0)
    backend = LOOPBACK.build(Group(0, 1, control), LOOPBACK.options())
    state = StepState(control, 10.0, device=CUDA)
    for step in range(2):
        work = backend.submit(Request(Op.ALL_REDUCE, torch.ones(4), key="w", step=step))
        state.wait(work, "w")
    assert state.take_waited_s() == pytest.approx(0.05)
    assert state.take_waited_s() == 0.0
    backend.close()


def test_random_numbers_go_on_on_the_device_too(monkeypatch: pytest.MonkeyPatch) -> None:
    there: dict[Any, torch.Tensor] = {CUDA: torch.tensor([7])}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: there[device])
    monkeypatch.setattr(
        torch.cuda, "set_rng_state", lambda state, device: there.update({device: state})
    )
    kept = random_state(CUDA)
    first, there[CUDA] = torch.rand(3), torch.tensor([8])
    set_random_state(CUDA, kept)
    assert there[CUDA].tolist() == [7]
    assert torch.equal(torch.rand(3), first)


@pytest.mark.parametrize(
    ("asked", "rank", "placed"), [("cuda", 3, "cuda:1"), ("cuda:1", 0, "cuda:1"), ("cpu", 3, None)]
)
def test_the_device_of_a_rank_is_the_current_one(
    asked: str, rank: int, placed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    current: list[str] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert place_device(asked, rank) == (placed or "cpu")
    assert current == ([placed] if placed else [])


def test_a_record_has_the_device_that_was_asked_for() -> None:
    """Each rank has another one: `cuda:0` in a command would put all of them on the first."""
    asked = RunConfig(device="cuda")
    cell = Cell(backend="gloo", workload="w", num_workers=2, config=RunConfig(device="cuda:0"))
    found = worker._as_asked(cell, asked)
    assert found is not None
    assert found.config.device == "cuda"
    assert "--device cuda:0" not in found.command
    assert "--device cuda" in found.command


@pytest.mark.parametrize(
    ("gpus", "channels", "error"),
    [
        (("a", "b", "c"), 2, None),  # each rank sees its own GPU alone, as number 0
        (("a", "b", "a"), 1, Unavailable),
        (("a", "b", "a"), 2, Unavailable),
    ],
)
def test_ranks_share_a_gpu_if_it_is_the_same_one(
    gpus: tuple[str, ...],
    channels: int,
    error: type[Exception] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nccl, "_gpu_of", lambda group: gpus[group.rank])
    monkeypatch.setattr(nccl, "nccl_version", lambda: (2, 28, 9))
    hub = InprocHub(len(gpus))
    groups = [
        Group(rank, len(gpus), hub.member(rank), device="cuda:0", num_channels=channels)
        for rank in range(len(gpus))
    ]

    def told(group: Group) -> type[Exception] | None:
        try:
            nccl.check_ranks(group)
        except (Unavailable, UsageError) as refused:
            return type(refused)
        return None

    with ThreadPoolExecutor(len(groups)) as pool:
        assert set(pool.map(told, groups)) == {error}
