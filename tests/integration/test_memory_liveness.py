"""Predicted live storages equal those that are measured in a run, and those of torch's tracker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from testbed.base.config import RunConfig
from testbed.memory.planning.lifetimes import Costs
from testbed.memory.planning.simulator import simulate
from testbed.memory.running.engine import ActivationEngine
from testbed.memory.strategy import Limits
from testbed.training.forecast import chosen, record_step
from testbed.training.replica import backward, make_replica
from testbed.workloads.load import load_workload
from tests.harness.runs import testbed

MODELS = ("resnet50", "vgg16", "densenet201", "inception-v4", "bert-base")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("memory", ["none", "checkpoint", "offload", "release", "laysa"])
@pytest.mark.parametrize("batch", [2, 4])
@pytest.mark.parametrize("workload", MODELS)
def test_what_is_predicted_is_measured(
    workload: str, batch: int, memory: str, tmp_path: Path
) -> None:
    found = memory_of(workload, batch, tmp_path, "--memory", memory)
    predicted, measured = (sum(found[kind].values()) for kind in ("predicted", "measured"))
    assert predicted == pytest.approx(measured, rel=1e-3)
    if found["kept_bytes"] is not None:  # pages that the allocator keeps are named, not predicted
        resident_bytes = found["resident_bytes"] - found["kept_bytes"]
        assert found["predicted_resident_bytes"] == pytest.approx(resident_bytes, rel=0.2)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("workload", "memory", "within"),
    [
        ("vgg16", "laysa", 1e-3),
        ("vgg16", "laysa:mirror=host", 1e-3),
        ("bert-base", "laysa", 1e-3),
        ("resnet50", "checkpoint", 1e-3),
        ("resnet50", "laysa", 1e-2),
        ("resnet50", "laysa:mirror=host", 2e-2),
    ],
)
def test_so_it_is_beside_sparse_messages(
    workload: str, memory: str, within: float, tmp_path: Path
) -> None:
    """Of small layers, how many are encoded at once depends on how fast that goes: up to 2 MiB."""
    sparse = ("--compressor", "ef:units=update+topk:ratio=0.01")
    found = memory_of(workload, 2, tmp_path, "--memory", memory, *sparse)
    predicted, measured = (sum(found[kind].values()) for kind in ("predicted", "measured"))
    assert predicted == pytest.approx(measured, rel=within)


@pytest.mark.parametrize("memory", ["none", "checkpoint", "release"])
def test_gradients_of_earlier_micro_batches_are_foreseen(memory: str, tmp_path: Path) -> None:
    found = memory_of("resnet20", 4, tmp_path, "--memory", memory, "--accumulate", "2")
    predicted, measured = (sum(found[kind].values()) for kind in ("predicted", "measured"))
    assert predicted == pytest.approx(measured, rel=0.01)


def test_what_servers_hold_of_the_optimizer_is_not_foreseen_on_workers(tmp_path: Path) -> None:
    servers = ("--backend", "zmq-ps:update=server", "--workers", "2", "--momentum", "0.9")
    found = memory_of("resnet20", 4, tmp_path, *servers)
    predicted, measured = found["predicted"], found["measured"]
    assert predicted["weights"] == measured["weights"]
    assert (predicted["optimizer"], measured.get("optimizer", 0)) == (0, 0)


def test_gradients_that_are_not_contiguous_are_released(tmp_path: Path) -> None:
    file = tmp_path / "strided.py"
    file.write_text(STRIDED)
    losses = []
    for memory in ("none", "release"):
        record = tmp_path / f"{memory}.json"
        alone = ("--backend", "none", "--workers", "1", "--steps", "3", "--batch-size", "4")
        done = testbed(
            "run",
            "--workload",
            f"{file}:build",
            *alone,
            *("--memory", memory, "--json", str(record)),
        )
        assert done.status == 0, done.err
        losses.append(json.loads(record.read_text())["samples"]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


STRIDED = """
import torch
from torch import nn

def build():
    head = nn.Flatten(), nn.Linear(128, 3)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), *head)
    images = torch.randn(16, 3, 8, 8).to(memory_format=torch.channels_last)
    data = torch.utils.data.TensorDataset(images, torch.arange(16) % 3)
    return model.to(memory_format=torch.channels_last), data, nn.CrossEntropyLoss()
"""


def memory_of(workload: str, batch: int, folder: Path, *options: str) -> dict[str, Any]:
    """What the record of a worker that is alone says of memory."""
    record = folder / "run.json"
    size = ("--workload", workload, "--batch-size", str(batch), "--steps", "3", "--warmup", "2")
    alone = ("--backend", "none", "--workers", "1", "--verify-steps", "0", "--measure-memory")
    done = testbed(*("run", *size, *alone, *options, "--json", str(record)), within_s=280.0)
    assert done.status == 0, done.err
    memory: dict[str, Any] = json.loads(record.read_text())["memory"]
    return memory


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("memory", ["none", "checkpoint"])
@pytest.mark.parametrize(
    ("workload", "batch"),
    [("resnet50", 2), ("bert-base", 2), ("resnet50:image_size=96,num_classes=10", 8)],
)
def test_torch_s_own_tracker_finds_the_same_peak(
    workload: str, batch: int, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts what is outside of the step for as long as it was shown it.

    As a dispatch mode, it keeps PyTorch from adding one gradient to another in place, and sees a
    step without that; so the prediction is of such a step.
    """
    monkeypatch.setattr(
        "testbed.memory.recording.capture.is_sum_of_gradients", lambda func, args: False
    )
    config = RunConfig(workload=workload, memory=memory, batch_size=batch)
    torch.manual_seed(1)
    replica = make_replica(load_workload(workload, seed=1), config, 3)
    step = record_step(replica, batch)
    plan = chosen(replica.strategy, step, Limits(None, Costs()))
    engine = replica.activations = ActivationEngine(plan)
    indices = torch.arange(batch).numpy()
    for number in range(2):
        tracker = MemTracker()
        if number == 1:
            tracker.track_external(replica.model, replica.optimizer)
        with tracker:
            backward(replica, indices, 1)
            replica.optimizer.step()
        replica.optimizer.zero_grad(set_to_none=True)
    engine.close()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert simulate(step, plan.actions).peak_bytes == pytest.approx(peak, rel=1e-3)
