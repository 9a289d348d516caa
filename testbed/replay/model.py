"""A recorded model: parameters of the true sizes, compute that is only waited for."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from testbed.errors import UsageError
from testbed.prediction.trace import Trace
from testbed.replay.cursor import ComputeCursor
from testbed.replay.layout import Run, runs_of
from testbed.replay.values import Values, shift_of


class Tape:
    """What all layers of a replayed model share.

    Attributes:
        cursor: spends the recorded times.
        values: of the gradients.
        scale: mean of the current batch's samples; what makes gradients differ between workers and
            steps.
        shift: `values.shift_of` it: by which elements are large.
        keeps_buffers: each gradient is written into the same memory in every step; off where
            gradients of several workers are held at once.
    """

    def __init__(self, cursor: ComputeCursor, values: Values) -> None:
        self.cursor = cursor
        self.values = values
        self.scale = 0.0
        self.shift = 0
        self.keeps_buffers = True
        self._buffers: dict[int, torch.Tensor] = {}

    def gradient(
        self, number: int, parameter: torch.Tensor, scale: float, shift: int
    ) -> torch.Tensor:
        """The gradient of a parameter in this step."""
        if not self.keeps_buffers or parameter.grad is not None:
            gradient = torch.empty_like(parameter)
        else:
            if number not in self._buffers:
                self._buffers[number] = torch.empty_like(parameter)
            # Another tensor of the same memory: autograd takes it over instead of copying it.
            gradient = self._buffers[number].detach()
        self.values.fill(gradient, number, scale, shift)
        return gradient


class _Recorded(torch.autograd.Function):
    """One tensor's part of the model: passes the signal on, has a gradient when its time comes."""

    @staticmethod
    def forward(
        ctx: Any,
        signal: torch.Tensor,
        parameter: torch.Tensor,
        tape: Tape,
        number: int,
        backward_s: float,
    ) -> torch.Tensor:
        ctx.parameter, ctx.tape, ctx.number = parameter, tape, number
        ctx.backward_s, ctx.scale, ctx.shift = backward_s, tape.scale, tape.shift
        return signal.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (upstream,) = grad_outputs
        gradient = ctx.tape.gradient(
            ctx.number, ctx.parameter, ctx.scale * float(upstream), ctx.shift
        )
        ctx.tape.cursor.spend(ctx.backward_s)
        return upstream, gradient, None, None, None


class RecordedLayer(nn.Module):
    """Owns parameters; spends the forward time of some of its tensors when it is called."""

    def forward(self, signal: torch.Tensor, tape: Tape, trace: Trace, run: Run) -> torch.Tensor:
        """The signal [] as it came, after the recorded forward time of the run's tensors."""
        tape.cursor.spend(sum(trace.tensors[i].forward_s for i in run.tensors))
        for index in run.tensors:
            tensor = trace.tensors[index]
            parameter = getattr(self, tensor.name.rpartition(".")[2])
            signal = _Recorded.apply(  # type: ignore[no-untyped-call]
                signal, parameter, tape, index, tensor.backward_s
            )
        return signal


class RecordedModel(nn.Module):
    """A trace as a model: one module per recorded layer, run as a chain in forward order.

    Its parameters have the names and sizes of the trace's tensors. A gradient is real memory with
    real values, a pattern shifted and scaled by the mean of the batch's samples (and scaled by the
    loss's own gradient), and becomes ready when the trace says so. No value is computed from
    the parameters: the loss says nothing about training.

    Args:
        trace: with names that `layout.owned` accepts; times are spent as they stand there.
        cursor: spends them.
        seed: of the parameters' and gradients' values.

    Raises:
        UsageError: a tensor's dtype has no gradients.
    """

    def __init__(self, trace: Trace, cursor: ComputeCursor, seed: int) -> None:
        super().__init__()
        self.trace = trace
        self.tape = Tape(cursor, Values(seed))
        self._runs = runs_of([tensor.name for tensor in trace.tensors])
        for index, tensor in enumerate(trace.tensors):
            dtype = getattr(torch, tensor.dtype)
            if not dtype.is_floating_point:
                raise UsageError(
                    f"tensor {tensor.name!r} of trace {trace.name!r} is of {tensor.dtype}, which "
                    "has no gradient in PyTorch; replay float32, float64, float16 or bfloat16"
                )
            parameter = nn.Parameter(torch.empty(tensor.num_elements, dtype=dtype))
            self.tape.values.fill(parameter.detach(), index, 0.1)
            owner, _, name = tensor.name.rpartition(".")
            self._layer(owner).register_parameter(name, parameter)
        self._called = [self._layer(run.owner) for run in self._runs]

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """The mean [] of the samples [B], once the recorded forward pass is over."""
        signal = samples.mean()
        self.tape.scale = float(signal)
        # Of the largest sample, which no order of additions changes.
        self.tape.shift = shift_of(float(samples.amax()))
        for layer, run in zip(self._called, self._runs, strict=True):
            signal = layer(signal, self.tape, self.trace, run)
        return signal

    def _layer(self, path: str) -> nn.Module:
        module: nn.Module = self
        for part in path.split("."):
            if part not in dict(module.named_children()):
                module.add_module(part, RecordedLayer())
            module = module.get_submodule(part)
        return module
