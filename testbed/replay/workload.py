"""`replay:TRACE`: the workload that replays a trace, and its model."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, SupportsFloat

import torch
from torch import nn

from testbed.base.errors import UsageError
from testbed.base.files import find_trace
from testbed.base.trace import Trace
from testbed.replay.layout import Run, owned, runs_of
from testbed.replay.values import Readings, Values, shift_of
from testbed.workloads.samples import TensorSamples
from testbed.workloads.workload import Workload

# A recorded model: parameters of the recorded sizes, compute time spent as waiting.


class ComputeCursor:
    """Spends recorded compute as waiting.

    The device works through its segments one after another; it stands still only while the run
    waits for messages:

        c = max(c, r) + d,   c the cursor, r the end of the last such wait, d the segment

    and `spend` returns at c, or at once where c has passed. Deadlines are absolute, so that a late
    wake-up does not make the next segment late, and what the host does meanwhile (hooks, copies,
    the optimizer) counts against the segment instead of being added to it, as on a device that
    computes by itself. Nothing spins.

    Args:
        now_s: seconds of a monotonic clock.
        sleep: blocks for so many seconds; may wake late.

    Example:
        >>> moments = iter([10.0, 10.0, 11.5])
        >>> slept = []
        >>> cursor = ComputeCursor(lambda: next(moments), slept.append)
        >>> cursor.spend(1.0)  # 10.0: ends at 11.0
        >>> cursor.spend(2.0)  # 11.5: half a second of it was lost to the host, ends at 13.0
        >>> slept
        [1.0, 1.5]
    """

    def __init__(self, now_s: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._now_s = now_s
        self._sleep = sleep
        self._end_s: float | None = None
        self._resumed_s = float("-inf")
        self._waits = True

    def spend(self, segment_s: float) -> None:
        """Wait until the device would have computed a segment of so many seconds."""
        if not self._waits:
            return
        if self._end_s is None:
            self._end_s = self._now_s()
        self._end_s = max(self._end_s, self._resumed_s) + segment_s
        rest_s = self._end_s - self._now_s()
        if rest_s > 0:
            self._sleep(rest_s)

    def resume(self) -> None:
        """The device was idle until now."""
        self._resumed_s = self._now_s()

    def stop_waiting(self) -> None:
        """From now on all compute takes no time."""
        self._waits = False


class Tape:
    """What all layers of a replayed model share.

    Attributes:
        cursor: spends the recorded times.
        values: of the gradients.
        readings: of the parameters, by which gradients depend on them.
        scale: mean of the current batch's samples; what makes gradients differ between workers and
            steps.
        shift: `values.shift_of` it: by which elements are large.
        keeps_buffers: each gradient is written into the same memory in every step; off where
            gradients of several workers are held at once.
    """

    def __init__(self, cursor: ComputeCursor, values: Values) -> None:
        self.cursor = cursor
        self.values = values
        self.readings = Readings()
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
        reading: SupportsFloat,
    ) -> torch.Tensor:
        ctx.parameter, ctx.tape, ctx.number = parameter, tape, number
        ctx.backward_s, ctx.scale, ctx.shift = backward_s, tape.scale, tape.shift
        ctx.reading = reading
        return signal.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (upstream,) = grad_outputs
        # Only now: on a GPU, a number is waited for.
        scale = ctx.scale * float(upstream) * ctx.tape.readings.factor(ctx.number, ctx.reading)
        gradient = ctx.tape.gradient(ctx.number, ctx.parameter, scale, ctx.shift)
        ctx.tape.cursor.spend(ctx.backward_s)
        return upstream, gradient, None, None, None, None


class RecordedLayer(nn.Module):
    """Owns parameters; spends the forward time of some of its tensors when it is called."""

    def forward(self, signal: torch.Tensor, tape: Tape, trace: Trace, run: Run) -> torch.Tensor:
        """The signal [] as it came, after the recorded forward time of the run's tensors."""
        tensors = [trace.tensors[index] for index in run.tensors]
        parameters = [getattr(self, tensor.name.rpartition(".")[2]) for tensor in tensors]
        # Read now, as a layer would: an update that comes while it computes comes too late.
        readings = list(map(tape.readings.read, run.tensors, parameters))
        tape.cursor.spend(sum(tensor.forward_s for tensor in tensors))
        for index, tensor, parameter, reading in zip(
            run.tensors, tensors, parameters, readings, strict=True
        ):
            signal = _Recorded.apply(  # type: ignore[no-untyped-call]
                signal, parameter, tape, index, tensor.backward_s, reading
            )
        return signal


class RecordedModel(nn.Module):
    """A trace as a model: one module per recorded layer, run as a chain in forward order.

        forward:  for each layer: wait t_f(layer)
        backward: for each tensor, last first: wait t_b(tensor), then its gradient is ready
        gradient_i[j] = loss gradient x mean(samples) x (1 + 4 (m_i - m_i at the start))
                        x pattern[(10007 i + shift + j) mod 262147]

    Its parameters have the names and sizes of the trace's tensors. A gradient is real memory with
    real values, shifted and scaled by the batch's samples, so that gradients of workers and steps
    differ. It depends on the parameter that its layer's forward pass read: m_i is a weighted mean
    of at most 64 elements (see `Readings`), so that a step which reads a parameter before its
    update ends elsewhere. The loss says nothing about training.

    Args:
        trace: with names that `layout.owned` accepts; times (s) are spent as they stand there.
        cursor: spends them.
        seed: of the parameters' and gradients' values.

    Raises:
        UsageError: a tensor's dtype has no gradients.

    Example:
        >>> from testbed.replay.layout import owned
        >>> trace = Trace.from_backward([2.0, 1.0], [4, 8], [0.5, 0.5], ["float32"] * 2)
        >>> slept = []
        >>> cursor = ComputeCursor(lambda: sum(slept), slept.append)
        >>> model = RecordedModel(owned(trace), cursor, seed=1)
        >>> model(torch.ones(3)).backward()
        >>> slept, [parameter.grad.shape for parameter in model.parameters()]
        ([0.5, 0.5, 2.0, 1.0], [torch.Size([8]), torch.Size([4])])

    Reference:
        None published: it replays what `testbed profile` recorded. Departs: layers run as a chain,
        whatever the trace's `consumers` say.
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
            self.tape.readings.begin(index, parameter)
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


NUM_SAMPLES = 65_536


def build_replay(trace: str, *, dilation: float, data_dir: str | None, seed: int) -> Workload:
    """The workload that replays a trace.

        layer l:  wait until c + d (s), d = dilation times the recorded time;  c = c + d
        gradient of tensor i:  a fixed pattern of noise, times the mean of the batch, times
                               1 + 4 (how far the parameter that was read has moved)

    c (s): when the layer before was done. Tensors have the recorded numbers of elements. A sample
    is a number between 0.5 and 1.5; the mean of a worker's samples scales its gradients, so that
    the usual proofs (order of samples, equality with a single process) hold here too.

    Args:
        trace: a shipped trace's name, or a `testbed.trace/1` file.
        dilation: how many times longer than recorded everything takes.
        data_dir: must be None.
        seed: of the samples and values.

    Raises:
        UsageError: no such trace, one that cannot be replayed, or a data folder.

    Example:
        >>> workload = build_replay("resnet50-v100", dilation=1, data_dir=None, seed=0)
        >>> sum(parameter.numel() for parameter in workload.model.parameters())
        25557032

    Reference:
        Zhu, Phanishayee and Pekhimenko, 2020, USENIX ATC (Daydream: what-if studies from traces).
        Departs: only compute is replayed, as waiting; messages are real.
    """
    if data_dir is not None:
        raise UsageError(f"--data is {data_dir!r}, but a replayed trace has no data; leave it out")
    recorded = owned(find_trace(trace))
    cursor = ComputeCursor(time.perf_counter, time.sleep)
    model = RecordedModel(recorded.stretched(dilation), cursor, seed)

    def for_values() -> None:
        cursor.stop_waiting()
        model.tape.keeps_buffers = False

    generator = torch.Generator("cpu").manual_seed(seed)
    return Workload(
        model=model,
        train=TensorSamples(torch.rand(NUM_SAMPLES, generator=generator, device="cpu") + 0.5),
        loss=lambda called, batch: called(batch[0]),
        batch_size=recorded.batch_size,
        learning_rate=0.01,
        # No trace records the optimizer, so that it is the one that costs the least.
        momentum=0.0,
        on_resume=cursor.resume,
        for_values=for_values,
        recorded=recorded,
        data=f"replayed {recorded.name} of {recorded.device}",
    )
