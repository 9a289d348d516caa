"""Activations kept, moved and made again on a GPU: the same numbers, in the predicted bytes."""

from __future__ import annotations

import pytest
import torch

from testbed.memory.planning.lifetimes import Costs
from testbed.memory.planning.simulator import simulate
from testbed.memory.recording.calibrate import asked_bytes
from testbed.memory.recording.record import record
from testbed.memory.running.engine import ActivationEngine
from testbed.memory.strategy import Limits
from testbed.training.forecast import chosen
from testbed.training.replica import strategy_of
from testbed.workloads.load import load_workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]

MEMORY = ("none", "checkpoint", "offload:min_kib=0", "laysa")


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("workload", ["resnet50", "densenet201", "bert-base:num_layers=2"])
def test_a_step_is_the_same_in_the_bytes_that_were_predicted(workload: str, memory: str) -> None:
    torch.backends.cudnn.deterministic = True
    loaded = load_workload(workload, seed=1)
    model, loss = loaded.model.cuda().train(), loaded.loss
    assert loss is not None
    batch = tuple(t.cuda() for t in loaded.train.batch(range(4)))
    buffers = [b.clone() for b in model.buffers()]
    step = record(model, loss, batch, calibrated=True)
    plan = chosen(strategy_of(memory, "none"), step, Limits(None, Costs()))

    def gradients(engine: ActivationEngine | None) -> list[torch.Tensor]:
        for buffer, first in zip(model.buffers(), buffers, strict=True):
            buffer.data.copy_(first)
        torch.manual_seed(3)
        model.zero_grad(set_to_none=True)
        if engine is None:
            value = loss(model, batch)
        else:
            with engine.forward():
                value = loss(model, batch)
        value.backward()  # type: ignore[no-untyped-call]
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    theirs = gradients(None)
    engine = ActivationEngine(plan)
    ours = gradients(engine)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    del ours, theirs
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    device = torch.device("cuda")
    beside_bytes = asked_bytes(device)[0] - step.weight_bytes - step.sample_bytes
    with engine.forward():
        value = loss(model, batch)
    value.backward()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    measured = asked_bytes(device)[1] - beside_bytes
    predicted = simulate(step, plan.actions, Costs(with_workspace=True)).peak_bytes
    engine.close()
    assert predicted == pytest.approx(measured, rel=0.02)
