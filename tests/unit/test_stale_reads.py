"""A layer that is read before its update: the proof of same work sees it, in replayed runs, too."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from testbed.backends.protocol import Backend, Group
from testbed.base.config import RunConfig
from testbed.base.files import save_trace
from testbed.base.link import Link
from testbed.base.plan import Plan
from testbed.base.trace import Trace, TraceTensor
from testbed.replay.workload import build_replay
from testbed.scheduling.protocol import make_plan
from testbed.training import trainer
from testbed.training.protocol import Run
from testbed.training.session import Session
from testbed.training.summary import TOLERANCE, Outcome, judge
from tests.harness.two_ranks import on_ranks

SCHEDULERS = (
    "pace:segment_kib=8",
    "p3:slice_elements=1500",
    "dear:mib=0.02",
    "bytescheduler:partition_kib=8,credit_kib=32",
)
SIZES = (300, 40, 7_000, 1_000, 4_000, 1, 2_000, 600)
LAYER = "layer1"
STEPS = 5


class LateSession(Session):
    """Updates one layer only after its forward pass has read it."""

    def _hook(self, model: torch.nn.Module) -> None:
        super()._hook(model)
        layer = model.get_submodule(LAYER)
        late = list(layer.parameters())
        self.late = set(map(id, late))

        def update_after(*ignored: Any) -> None:
            Session._about_to_read(self, late)

        self._handles.append(layer.register_forward_hook(update_after))

    def _about_to_read(self, parameters: Any) -> None:
        super()._about_to_read([p for p in parameters if id(p) not in self.late])


@pytest.fixture
def trace(tmp_path: Path) -> str:
    tensors = tuple(
        TraceTensor(
            name=f"layer{i // 2}.{'weight' if i % 2 == 0 else 'bias'}",
            num_elements=size,
            forward_s=1e-4,
            backward_s=2e-4,
        )
        for i, size in enumerate(SIZES)
    )
    place = tmp_path / "toy.json"
    save_trace(Trace(name="toy", device="V100", batch_size=8, tensors=tensors), place)
    return str(place)


def train(trace: str, scheduler: str, **settings: Any) -> tuple[bool | None, str, Outcome]:
    """Two ranks on loopback; the verdict, its reason, and what rank 0 brings home."""
    build = functools.partial(build_replay, trace, dilation=1.0, data_dir=None, seed=1)
    recorded = build().recorded
    assert isinstance(recorded, Trace)
    link = Link(backend="loopback", num_workers=2, latency_s=2e-5, seconds_per_byte=1e-7)
    plan: Plan = make_plan(scheduler, recorded, link)
    assert plan.crosses_iteration
    config = RunConfig(scheduler=scheduler, steps=STEPS, warmup=1, **settings)

    def rank(backend: Backend, group: Group) -> Outcome:
        return trainer.train(Run(config, backend, group.control, build, plan), build())

    outcomes = on_ranks(rank, 2, plan.order, plan.num_channels, plan.credit_bytes)
    return *judge(config, outcomes, "bsp"), outcomes[0]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_stale_read_is_other_work(
    trace: str, scheduler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_same, note, _ = train(trace, scheduler)
    assert is_same is True, note
    monkeypatch.setattr(trainer, "Session", LateSession)
    is_same, note, outcome = train(trace, scheduler)
    assert is_same is False
    assert note.startswith("differs from a single process by")
    assert f"after {STEPS} steps, most in '{LAYER}." in note
    assert outcome.reference_error is not None
    assert outcome.reference_error > 10 * TOLERANCE["float32"]


@pytest.mark.parametrize(
    "settings",
    [
        {"accumulate": 2},
        {"precision": "float64"},
        {"optimizer": "adam"},
        {"compressor": "ef+topk:ratio=0.2"},
    ],
)
def test_a_stale_read_is_seen_under_other_settings(
    trace: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_same, note, _ = train(trace, "p3:slice_elements=1500", **settings)
    assert is_same is True, note
    monkeypatch.setattr(trainer, "Session", LateSession)
    assert train(trace, "p3:slice_elements=1500", **settings)[0] is False
