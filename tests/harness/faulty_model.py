"""A user's own model whose loss does something terrible on one rank at one step."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import torch

from testbed import Workload

DIGIT_SHAPE, NUM_CLASSES = 16, 4


def build(
    fault: str = "none", rank: int = 1, at: int = 3, note: str = "", norm: int = 0
) -> Workload:
    """`note`: file that is told when the fault was committed; a node that is cut off is mute.

    `norm`: the model has buffers, which DDP sends before each forward pass.
    """
    torch.set_num_threads(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(DIGIT_SHAPE, 32),
        torch.nn.BatchNorm1d(32) if norm else torch.nn.Identity(),
        torch.nn.ReLU(),
        torch.nn.Linear(32, NUM_CLASSES),
    )
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(512, DIGIT_SHAPE, generator=generator)
    targets = torch.randint(NUM_CLASSES, (512,), generator=generator)
    calls = iter(range(1 << 30))

    def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        value = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        if next(calls) == at and own_rank() == rank:
            if note:
                Path(note).write_text(str(time.time()))
            return value * commit(fault)
        return value

    data = torch.utils.data.TensorDataset(inputs, targets)
    return Workload(model=model, train=data, loss=loss, batch_size=8, data="made up by the test")


def own_rank() -> int:
    names = ("TESTBED_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK")
    return next((int(os.environ[name]) for name in names if name in os.environ), 0)


def commit(fault: str) -> float:
    if fault == "raise":
        raise RuntimeError("the model is broken on purpose")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "cut":  # the emulated node's cable; nobody else's device has this name
        subprocess.run(["ip", "link", "set", "dev", "tb0", "down"], check=True)
        return 1.0
    if fault == "hang":
        threading.Event().wait()
    return float("nan") if fault == "nan" else 1.0
