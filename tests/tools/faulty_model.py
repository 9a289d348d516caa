"""A small model whose ranks are held up, or whose exchanges start late, in windows of a run."""

from __future__ import annotations

import time

import torch

from testbed.backends.staged import DelayedBackend
from testbed.base.types import Op, Request, Result
from testbed.launch.join import who_am_i
from testbed.workloads.workload import Workload


def parse_windows(text: str) -> frozenset[int]:
    """Steps of windows written as `20-31+44-55`.

    Example:
        >>> sorted(parse_windows("3-4+7-7"))
        [3, 4, 7]
    """
    pairs = (piece.split("-") for piece in text.split("+") if piece)
    return frozenset(step for first, last in pairs for step in range(int(first), int(last) + 1))


class Net(torch.nn.Module):
    """A multilayer perceptron that sleeps before the backward pass of some of its steps."""

    def __init__(self, width: int, depth: int, late_s: float, steps: frozenset[int]) -> None:
        super().__init__()
        widths = [width] * depth
        if depth < 20:  # tensors of different sizes, so that start-up and bytes can be told apart
            widths = [width >> (2 * (k % 3)) for k in range(depth)]
        pairs = zip([64, *widths], [*widths, 10], strict=True)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(a, b) for a, b in pairs)
        self._late_s, self._steps, self._step = late_s, steps, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The logits."""
        for layer in self.layers[:-1]:
            inputs = torch.relu(layer(inputs))
        if self.training and torch.is_grad_enabled():
            if self._late_s and self._step in self._steps:
                time.sleep(self._late_s)
            self._step += 1
        logits: torch.Tensor = self.layers[-1](inputs)
        return logits


def hold_up_exchanges(more_s: float, steps: frozenset[int]) -> None:
    """Every exchange of these steps starts later, on clusters whose latency is injected."""
    usual = DelayedBackend._start_late

    def later(self: DelayedBackend, request: Request) -> Result:
        if request.step in steps and request.op is not Op.BARRIER:
            time.sleep(more_s)
        return usual(self, request)

    DelayedBackend._start_late = later  # type: ignore[method-assign]


def build(
    width: int = 1024,
    depth: int = 6,
    batch: int = 256,
    late_rank: int = -1,
    late_ms: float = 20.0,
    startup_ms: float = 0.0,
    windows: str = "",
) -> Workload:
    """The workload; windows as `20-31+44-55`."""
    steps = parse_windows(windows)
    if startup_ms:
        hold_up_exchanges(startup_ms / 1e3, steps)
    is_late = who_am_i().rank == late_rank
    model = Net(width, depth, late_ms / 1e3 if is_late else 0.0, steps)
    inputs = torch.randn(4096, 64)
    train = torch.utils.data.TensorDataset(inputs, inputs[:, :10].argmax(1))
    return Workload(model=model, train=train, batch_size=batch, data="synthetic: normal numbers")
