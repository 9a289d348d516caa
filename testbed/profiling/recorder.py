"""Records when each layer of a training step begins and when each gradient is ready."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from testbed.base.dtypes import ELEMENT_BYTES
from testbed.base.errors import UsageError
from testbed.base.trace import Trace, TraceTensor
from testbed.profiling.dag import Dag, consumers_of
from testbed.profiling.overhead import Step
from testbed.profiling.survey import Survey, backward_times_s, forward_shares_s, spread, survey_step

# Clocks of the host and of a GPU, whose events do not stall it; read only after the step.


class Clock(Protocol):
    """Records moments cheaply; the time between them is read afterwards."""

    def mark(self) -> Any:
        """This moment."""
        ...

    def settle(self) -> None:
        """Wait until all moments taken so far have passed."""
        ...

    def between_s(self, start: Any, end: Any) -> float:
        """Seconds from one moment to another; both must have passed."""
        ...


class HostClock:
    """The host's monotonic clock, for models that compute on the host."""

    def mark(self) -> float:
        """See `Clock.mark`."""
        return time.perf_counter()

    def settle(self) -> None:
        """See `Clock.settle`; nothing to wait for."""

    def between_s(self, start: float, end: float) -> float:
        """See `Clock.between_s`."""
        return end - start


class CudaClock:
    """Events in the GPU's queue; the host waits for them only after the step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """See `Clock.mark`."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        """See `Clock.settle`."""
        torch.cuda.synchronize(self._device)

    def between_s(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """See `Clock.between_s`."""
        return float(start.elapsed_time(end)) * 1e-3


def clock_of(device: torch.device) -> Clock:
    """The clock of the device that computes."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


# Profiling must not change training: buffers, gradients and random state are restored.


@contextmanager
def preserved(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Afterwards buffers (batch statistics), gradients and random state are those of before.

    Parameters need no care: without an optimizer step nothing changes them.

    Args:
        model: its gradients are None inside, until a step makes some.
        device: whose random state is kept, beside the CPU's.
    """
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        clear_gradients(model)
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient


def clear_gradients(model: torch.nn.Module) -> None:
    """As `optimizer.zero_grad(set_to_none=True)`: the next step allocates them anew."""
    for parameter in model.parameters():
        parameter.grad = None


MAX_PLAIN_STEPS = 5


@dataclass(frozen=True)
class _Halves:
    """Seconds of one step: both halves, and moments within them (NaN: did not happen)."""

    forward_s: float
    backward_s: float
    begins_s: tuple[float, ...] = ()
    model_end_s: float = float("nan")
    ready_s: tuple[float, ...] = ()


def record_trace(
    model: torch.nn.Module,
    step: Step,
    *,
    name: str,
    device: str,
    batch_size: int,
    warmup: int = 5,
    repeats: int = 20,
    find_dag: bool = True,
) -> Trace:
    """Forward and backward time of each tensor, in forward order; leaves the model as it was.

    On a GPU moments are events in its own queue and nothing waits for the device before a step is
    over. A few steps in between run without hooks; their totals stand in `Trace.extra` beside
    those with hooks and show what the hooks cost.

    `Trace.extra` holds `origin` (`measured`), `recorded` (how, totals, what ran before the first
    layer, as loss and after the last gradient; all three are part of the tensors' times),
    `activation_bytes` (output bytes of each leaf module in one step) and `dag` (where the consumers
    come from).

    Args:
        model: in the mode in which it trains, without hooks that communicate.
        step: on one fixed batch on the device; see `training_step`.
        name: of the workload.
        device: `cpu` or `cuda[:index]`, where the model is.
        batch_size: samples in the batch.
        warmup: steps before any is timed: the first allocate, tune kernels and fill caches.
        repeats: timed steps; times are medians.
        find_dag: look for the branches of the model; otherwise the trace is a chain.

    Raises:
        UsageError: no repeats, no gradient, or a dtype that no trace can hold.

    Reference:
        Shi, Chu and Li, 2019, INFOCOM (MG-WFBP), profile backward times in gradient hooks. Departs:
        they synchronise the device in every hook, which prolongs what it measures.
    """
    if repeats < 1 or warmup < 0:
        raise UsageError(f"repeats is {repeats} and warmup {warmup}; expected >= 1 and >= 0")
    place = torch.device(device)
    clock = clock_of(place)
    with preserved(model, place):
        for _ in range(warmup):
            _run_plain(model, step, clock)
        survey = survey_step(model, step)
        timed, plain = _take_samples(model, step, clock, survey, repeats)
        dag = _find_dag(model, survey) if find_dag else Dag(None, "chain", "not looked for")
    return Trace(
        name=name,
        device=torch.cuda.get_device_name(place) if place.type == "cuda" else device,
        batch_size=batch_size,
        tensors=_tensors(survey, timed),
        consumers=dag.consumers,
        extra={
            "origin": "measured",
            "recorded": {**_facts(timed, plain, warmup), **_gpu_facts(place)},
            "activation_bytes": survey.activation_bytes,
            "dag": {"source": dag.source, "reason": dag.reason},
        },
    )


def _take_samples(
    model: torch.nn.Module, step: Step, clock: Clock, survey: Survey, repeats: int
) -> tuple[list[_Halves], list[_Halves]]:
    timed: list[_Halves] = []
    plain: list[_Halves] = []
    stride = -(-repeats // MAX_PLAIN_STEPS)
    for number in range(repeats):
        timed.append(_run_hooked(model, step, clock, survey))
        if number % stride == 0:
            plain.append(_run_plain(model, step, clock))
    return timed, plain


def _run_plain(model: torch.nn.Module, step: Step, clock: Clock) -> _Halves:
    start, middle, end = _run(model, step, clock)
    return _Halves(clock.between_s(start, middle), clock.between_s(middle, end))


def _run(model: torch.nn.Module, step: Step, clock: Clock) -> tuple[Any, Any, Any]:
    clear_gradients(model)
    clock.settle()
    start = clock.mark()
    loss = step.forward()
    middle = clock.mark()
    step.backward(loss)
    end = clock.mark()
    clock.settle()
    return start, middle, end


class _Marks:
    """The moments of one hooked step; None where something did not happen."""

    def __init__(self, clock: Clock, survey: Survey) -> None:
        self._clock = clock
        self.begins: list[Any] = [None] * len(survey.layers)
        self.ready: list[Any] = [None] * len(survey.parameters)
        self.model_end: Any = None

    def hook(self, model: torch.nn.Module, survey: Survey, hooks: ExitStack) -> None:
        """Have all moments marked until the stack unwinds."""
        for number, layer in enumerate(survey.layers):
            begin = partial(self._begin, number)
            hooks.callback(layer.module.register_forward_pre_hook(begin).remove)
        hooks.callback(model.register_forward_hook(self._end_model).remove)
        for index, parameter in enumerate(survey.parameters):
            handle: Any = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._become_ready, index)
            )
            hooks.callback(handle.remove)

    def since(self, start: Any, moments: list[Any]) -> tuple[float, ...]:
        """Seconds from the start to each moment, NaN for those that did not come."""
        missing = float("nan")
        return tuple(missing if m is None else self._clock.between_s(start, m) for m in moments)

    def _begin(self, layer: int, module: torch.nn.Module, arguments: Any) -> None:
        if self.begins[layer] is None:
            self.begins[layer] = self._clock.mark()

    def _end_model(self, module: torch.nn.Module, arguments: Any, output: Any) -> None:
        self.model_end = self._clock.mark()

    def _become_ready(self, index: int, parameter: torch.Tensor) -> None:
        self.ready[index] = self._clock.mark()  # the last accumulation counts


def _run_hooked(model: torch.nn.Module, step: Step, clock: Clock, survey: Survey) -> _Halves:
    marks = _Marks(clock, survey)
    with ExitStack() as hooks:
        marks.hook(model, survey, hooks)
        start, middle, end = _run(model, step, clock)
    return _Halves(
        clock.between_s(start, middle),
        clock.between_s(middle, end),
        marks.since(start, marks.begins),
        marks.since(start, [marks.model_end])[0],
        marks.since(middle, marks.ready),
    )


def _tensors(survey: Survey, timed: list[_Halves]) -> tuple[TraceTensor, ...]:
    count = len(survey.names)
    totals_s = [t.forward_s for t in timed]
    if survey.layers:
        shares = forward_shares_s([t.begins_s for t in timed], totals_s)
        forward_s = spread(list(shares), [layer.tensors for layer in survey.layers], count)
    else:  # no layer is ever called as such: all tensors are read by whoever came first
        forward_s = spread([statistics.median(totals_s)], [(0,)], count)
    backward_s = backward_times_s([t.ready_s for t in timed], [t.backward_s for t in timed])
    return tuple(
        TraceTensor(
            name=name,
            num_elements=parameter.numel(),
            dtype=_dtype(name, parameter),
            forward_s=forward_s[index],
            backward_s=float(backward_s[index]),
        )
        for index, (name, parameter) in enumerate(zip(survey.names, survey.parameters, strict=True))
    )


def _dtype(name: str, parameter: torch.Tensor) -> str:
    found = str(parameter.dtype).removeprefix("torch.")
    if found not in ELEMENT_BYTES:
        raise UsageError(
            f"parameter {name!r} is of {found}; a trace holds {', '.join(ELEMENT_BYTES)}"
        )
    return found


def _find_dag(model: torch.nn.Module, survey: Survey) -> Dag:
    if survey.arguments is None:
        return Dag(None, "chain", "the loss never calls the model as a whole")
    arguments, keywords = survey.arguments
    return consumers_of(model, arguments, keywords, survey.names)


def _gpu_facts(device: torch.device) -> dict[str, Any]:
    """What decides how fast a GPU computes in float32, and with which libraries it did."""
    if device.type != "cuda":
        return {}
    return {
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "tf32_convolutions": torch.backends.cudnn.allow_tf32,
        "tf32_products": torch.backends.cuda.matmul.allow_tf32,
    }


def _facts(timed: list[_Halves], plain: list[_Halves], warmup: int) -> dict[str, Any]:
    def median(values: list[float]) -> float | None:
        known = [v for v in values if v == v]
        return statistics.median(known) if known else None

    return {
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "warmup": warmup,
        "repeats": len(timed),
        "forward_s": median([t.forward_s for t in timed]),
        "backward_s": median([t.backward_s for t in timed]),
        "unhooked_forward_s": median([t.forward_s for t in plain]),
        "unhooked_backward_s": median([t.backward_s for t in plain]),
        "before_first_layer_s": median([min(t.begins_s, default=0.0) for t in timed]),
        "loss_s": median([t.forward_s - t.model_end_s for t in timed]),
        "after_last_gradient_s": median(
            [t.backward_s - max(r for r in t.ready_s if r == r) for t in timed]
        ),
    }
