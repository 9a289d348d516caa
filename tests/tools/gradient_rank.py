"""A rank that trains a model of a single gradient, and a record of the project's calls meanwhile.

`trace_gradient` starts it, in the checkout that it looks at: nothing is imported from here, and of
the project only what a user's script imports. Records are lines of a file for each process:

    nanoseconds of the monotonic clock, name of the thread, file or mark, function
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = "GRADIENT_ROOT"
FOLDER = "GRADIENT_FOLDER"
BEGIN, END = "<begin>", "<end>"
"""Marks in rank 0's record: before `loss.backward()`, after `optimizer.step()`."""


class Recorder:
    """Writes a line for each call of a function of the project, in this thread and later ones.

    Args:
        root: folder of the project; only functions of files below it count.
        file: where lines are appended, each at once: a server may be ended at any time.
    """

    def __init__(self, root: str, file: Path) -> None:
        self._root = root.rstrip("/") + "/"
        self._fd = os.open(file, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)

    def start(self) -> None:
        """Record from now on."""
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    def write(self, where: str, what: str) -> None:
        """One line."""
        thread = threading.current_thread().name.replace("\t", " ")
        os.write(self._fd, f"{time.monotonic_ns()}\t{thread}\t{where}\t{what}\n".encode())

    def _see(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(self._root):
            code = frame.f_code
            self.write(code.co_filename.removeprefix(self._root), code.co_qualname)


def record() -> None:
    """Record the calls of this process, if it is rank 0 of the job or was started by it."""
    folder = os.environ.get(FOLDER)
    if folder and os.environ.get("OMPI_COMM_WORLD_RANK") == "0":
        Recorder(os.environ[ROOT], Path(folder) / f"{os.getpid()}.calls").start()


def train(backends: list[str], num_steps: int, rows: int) -> None:
    """Steps of a linear layer without a bias: one gradient of `rows` times 1024 elements.

    Args:
        backends: one after another, each with a model of its own.
        num_steps: on each.
        rows: of the layer.
    """
    import torch

    folder, rank = Path(os.environ[FOLDER]), int(os.environ["OMPI_COMM_WORLD_RANK"])
    (folder / f"rank.{rank}").write_text(str(os.getpid()))
    marks = Recorder(os.environ[ROOT], folder / f"marks.{rank}")
    for backend in backends:
        torch.manual_seed(1)
        model = torch.nn.Linear(1024, rows, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        _train(backend, model, optimizer, num_steps, marks)


def _train(backend: str, model: Any, optimizer: Any, num_steps: int, marks: Recorder) -> None:
    import torch

    import testbed

    session = testbed.distribute(model, optimizer, backend, scheduler="wfbp", deadline_s=30.0)
    for _ in range(num_steps):
        loss = model(torch.ones(2, 1024)).sum()
        marks.write(BEGIN, backend)
        loss.backward()
        optimizer.step()
        marks.write(END, backend)
        optimizer.zero_grad()
    session.close()


if __name__ == "__main__":
    train(sys.argv[3:], int(sys.argv[1]), int(sys.argv[2]))
