"""A recorded trace as a model: its clock, its names and its gradients."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from testbed.base.errors import UsageError
from testbed.base.files import save_trace
from testbed.base.spec import parse_spec
from testbed.base.trace import Trace, TraceTensor
from testbed.replay.layout import owned, runs_of
from testbed.replay.values import (
    NUM_READ,
    PATTERN_ELEMENTS,
    SENSITIVITY,
    Readings,
    Values,
    shift_of,
)
from testbed.replay.workload import ComputeCursor, build_replay
from testbed.training.reference import relative_errors
from testbed.training.summary import TOLERANCE
from testbed.workloads.load import load_workload
from testbed.workloads.workload import Workload


class Time:
    """A clock that only sleeping and `pass_s` move; every sleep ends late."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.now_s = 100.0
        self.late_s = late_s

    def read(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        assert duration_s > 0
        self.now_s += duration_s + self.late_s


def make_cursor(late_s: float = 0.0) -> tuple[Time, ComputeCursor]:
    time = Time(late_s)
    return time, ComputeCursor(time.read, time.sleep)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(0, 40))
def test_late_wake_ups_do_not_add_up(segments_ms: list[int], late_ms: int) -> None:
    time, cursor = make_cursor(late_ms * 1e-3)
    for segment_ms in segments_ms:
        cursor.spend(segment_ms * 1e-3)
    spent_s = time.now_s - 100.0
    total_s = sum(segments_ms) * 1e-3
    assert total_s - 1e-9 <= spent_s <= total_s + late_ms * 1e-3 + 1e-9


def test_what_the_host_does_counts_against_the_deadline() -> None:
    time, cursor = make_cursor()
    cursor.spend(1.0)
    time.now_s += 0.4  # a hook
    cursor.spend(1.0)
    assert time.now_s == pytest.approx(102.0)
    time.now_s += 1.5  # an optimizer that takes longer than the next segment
    cursor.spend(1.0)
    assert time.now_s == pytest.approx(103.5)
    cursor.spend(1.0)
    assert time.now_s == pytest.approx(104.0)


def test_waiting_for_messages_is_added() -> None:
    time, cursor = make_cursor()
    cursor.spend(1.0)
    time.now_s += 5.0
    cursor.resume()
    cursor.spend(1.0)
    assert time.now_s == pytest.approx(107.0)


def test_resuming_before_the_cursor_takes_nothing_back() -> None:
    time, cursor = make_cursor()
    cursor.spend(1.0)
    cursor.resume()
    time.now_s += 0.25
    cursor.spend(1.0)
    assert time.now_s == pytest.approx(102.0)


def test_a_cursor_that_stopped_waiting_takes_no_time() -> None:
    time, cursor = make_cursor()
    cursor.stop_waiting()
    cursor.spend(10.0)
    assert time.now_s == 100.0


def test_a_large_tensor_repeats_the_pattern_at_no_usual_slice() -> None:
    values = Values(seed=1)
    tensor = torch.empty(2 * PATTERN_ELEMENTS + 5)
    values.fill(tensor, number=3, scale=2.0)
    pattern = values.pattern(torch.float32, tensor.device)
    start = 3 * 10_007 % PATTERN_ELEMENTS
    index = (start + torch.arange(len(tensor))).remainder(PATTERN_ELEMENTS)
    assert torch.equal(tensor, 2 * pattern[index])
    assert all(PATTERN_ELEMENTS % divisor for divisor in range(2, 512))


def make_trace(names: list[str], sizes: list[int] | None = None, each_s: float = 1e-4) -> Trace:
    tensors = tuple(
        TraceTensor(
            name=name,
            num_elements=(sizes or [5] * len(names))[i],
            forward_s=each_s,
            backward_s=2 * each_s,
        )
        for i, name in enumerate(names)
    )
    return Trace(name="toy", device="V100", batch_size=4, tensors=tensors)


def load(folder: Path, trace: Trace, dilation: float = 1.0, spec: str = "replay:{}") -> Workload:
    save_trace(trace, folder / "trace.json")
    return load_workload(spec.format(folder / "trace.json"), seed=1, dilation=dilation)


def test_names_without_a_module_get_one() -> None:
    trace = owned(make_trace(["w", "block.conv.weight", "block.conv.bias", "t2"]))
    assert [t.name for t in trace.tensors] == [
        "w.weight",
        "block.conv.weight",
        "block.conv.bias",
        "t2.weight",
    ]
    assert [run.tensors for run in runs_of([t.name for t in trace.tensors])] == [(0,), (1, 2), (3,)]


@pytest.mark.parametrize("names", [["a.b", "a.b"], ["a.b", "a.b.c"], ["a..b"], [".w"], []])
def test_names_that_no_model_has_are_refused(names: list[str]) -> None:
    with pytest.raises(UsageError, match="toy"):
        owned(make_trace(names))


def test_the_model_has_the_tensors_of_the_trace(tmp_path: Path) -> None:
    trace = make_trace(["a.weight", "b.weight", "a.bias", "c"], [7, 0, 3, 1])
    workload = load(tmp_path, trace)
    named = {n: p.numel() for n, p in workload.model.named_parameters()}
    assert named == {"a.weight": 7, "a.bias": 3, "b.weight": 0, "c.weight": 1}
    assert workload.batch_size == 4
    assert workload.data == "replayed toy of V100"


def step(workload: Workload, first: int = 0) -> None:
    batch = workload.train.batch(range(first, first + 4))
    assert workload.loss is not None
    torch.autograd.backward(workload.loss(workload.model, batch))


def test_gradients_come_in_backward_order_and_follow_the_samples(tmp_path: Path) -> None:
    workload = load(tmp_path, make_trace(["a.weight", "a.bias", "b.weight"]))
    order: list[str] = []
    for name, parameter in workload.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: order.append(name))
    step(workload)
    assert order == ["b.weight", "a.bias", "a.weight"]
    for first in (0, 4):
        workload.model.zero_grad(set_to_none=True)
        step(workload, first)
        samples = workload.train.batch(range(first, first + 4))[0]
        mean, shift = float(samples.mean()), shift_of(float(samples.amax()))
        for number, parameter in enumerate(workload.model.parameters()):
            assert parameter.grad is not None
            expected = torch.empty_like(parameter)
            Values(seed=1).fill(expected, number, mean, shift)
            torch.testing.assert_close(parameter.grad, expected)


def test_workers_with_other_batches_have_their_largest_elements_elsewhere(tmp_path: Path) -> None:
    workload = load(tmp_path, make_trace(["a.weight"], [100_000]))
    (parameter,) = workload.model.parameters()
    selected = []
    for first in (0, 4, 8, 12):
        workload.model.zero_grad(set_to_none=True)
        step(workload, first)
        assert parameter.grad is not None
        selected.append(set(parameter.grad.abs().topk(1000).indices.tolist()))
    assert len(set().union(*selected)) > 3800  # 4 x 1000, and 1 % of them by chance


def test_gradients_lie_in_the_same_memory_in_every_step(tmp_path: Path) -> None:
    workload = load(tmp_path, make_trace(["a.weight"], [1000]))
    (parameter,) = workload.model.parameters()
    places = set()
    for first in (0, 4, 8):
        step(workload, first)
        assert parameter.grad is not None
        places.add(parameter.grad.data_ptr())
        workload.model.zero_grad(set_to_none=True)
    assert len(places) == 1


def test_micro_batches_add_up(tmp_path: Path) -> None:
    workload = load(tmp_path, make_trace(["a.weight"], [1000]))
    (parameter,) = workload.model.parameters()
    single = []
    for first in (0, 4):
        step(workload, first)
        assert parameter.grad is not None
        single.append(parameter.grad.clone())
        workload.model.zero_grad(set_to_none=True)
    step(workload, 0)
    step(workload, 4)
    torch.testing.assert_close(parameter.grad, single[0] + single[1])


def test_the_reference_keeps_gradients_of_several_workers(tmp_path: Path) -> None:
    workload = load(tmp_path, make_trace(["a.weight"], each_s=1000.0))
    assert workload.for_values is not None
    workload.for_values()
    (parameter,) = workload.model.parameters()
    step(workload, 0)
    held = parameter.grad
    assert held is not None
    before = held.clone()
    workload.model.zero_grad(set_to_none=True)
    step(workload, 4)
    assert torch.equal(held, before)


def read_factors(workload: Workload, start: int = 0) -> list[float]:
    """By how much each gradient is larger than one of the first parameters."""
    workload.model.zero_grad(set_to_none=True)
    step(workload, start)
    samples = workload.train.batch(range(start, start + 4))[0]
    mean, shift = float(samples.mean()), shift_of(float(samples.amax()))
    factors = []
    for number, parameter in enumerate(workload.model.parameters()):
        plain = torch.empty_like(parameter)
        Values(seed=1).fill(plain, number, mean, shift)
        assert parameter.grad is not None
        factors.append(float((parameter.grad.double() / plain.double()).median()))
    return factors


def test_a_gradient_follows_what_the_forward_pass_read(tmp_path: Path) -> None:
    workload = load(tmp_path, make_trace(["a.weight", "b.weight"], [1000, 5]))
    a, b = workload.model.parameters()
    with torch.no_grad():
        a[16] += 0.01  # the second that is read, of every sixteenth
        a[17] += 1.0  # not read
        b[-1] += 0.02
    pull_a = -(1 + 1 / 62) / torch.linspace(1, 2, 63).norm()
    pull_b = 2 / torch.linspace(1, 2, 5).norm()
    expected = [1 + SENSITIVITY * 0.01 * float(pull_a), 1 + SENSITIVITY * 0.02 * float(pull_b)]
    assert read_factors(workload) == pytest.approx(expected, rel=1e-5)
    assert workload.loss is not None
    # What changes after it was read counts in the next step.
    assert a.grad is not None
    before = a.grad.clone()
    workload.model.zero_grad(set_to_none=True)
    loss = workload.loss(workload.model, workload.train.batch(range(4)))
    with torch.no_grad():
        a[0] += 5.0
    torch.autograd.backward(loss)
    assert torch.equal(a.grad, before)
    assert read_factors(workload)[0] > 2.0


@given(st.integers(1, 5000))
def test_at_most_64_elements_are_read_from_end_to_end(size: int) -> None:
    readings, parameter = Readings(), torch.zeros(size)
    readings.begin(0, parameter)
    seen = []
    for element in range(0, size, max(1, size // 700)):
        parameter[element] = 1.0
        seen += [element] * (readings.factor(0, readings.read(0, parameter)) != 1.0)
        parameter[element] = 0.0
    step = -(-size // NUM_READ)
    assert seen == [e for e in range(0, size, max(1, size // 700)) if e % step == 0]
    assert len(range(0, size, step)) <= NUM_READ


def test_one_stale_step_of_four_workers_is_100_times_what_rounding_explains(
    tmp_path: Path,
) -> None:
    """Each step is taken twice: with gradients of its own parameters, and of those before."""
    sizes = [10, 100, 1000, 10_000, 1, 64, 65, 3000]
    trace = make_trace([f"l{i}.weight" for i in range(len(sizes))], sizes, 0.0)
    workload = load(tmp_path, trace)
    assert workload.for_values is not None
    workload.for_values()
    parameters = list(workload.model.parameters())

    def mean_gradients(number: int) -> list[torch.Tensor]:
        workload.model.zero_grad(set_to_none=True)
        for rank in range(4):
            step(workload, 16 * number + 4 * rank)
        return [p.grad / 4 for p in parameters if p.grad is not None]

    def put(values: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(value)

    def after(values: list[torch.Tensor], gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        rate = workload.learning_rate
        return [p - rate * g for p, g in zip(values, gradients, strict=True)]

    errors: list[float] = []
    for number in range(1, 9):
        before = [p.detach().clone() for p in parameters]
        now = after(before, mean_gradients(number))
        stale = mean_gradients(number + 1)
        put(now)
        fresh = mean_gradients(number + 1)
        errors += relative_errors(after(now, stale), after(now, fresh))
    assert 30 < statistics.median(errors) / TOLERANCE["float32"] < 300


def test_a_rounding_stays_a_rounding(tmp_path: Path) -> None:
    workload = load(tmp_path, make_trace(["a.weight"], [1000]))
    (parameter,) = workload.model.parameters()
    factors = read_factors(workload)
    with torch.no_grad():
        parameter *= 1 + 1e-7
    assert read_factors(workload) == pytest.approx(factors, rel=2e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_dtypes_are_read_as_well(tmp_path: Path, dtype: str) -> None:
    trace = make_trace(["a.weight", "a.bias"], [1000, 3])
    tensors = tuple(msgspec.structs.replace(t, dtype=dtype) for t in trace.tensors)
    workload = load(tmp_path, msgspec.structs.replace(trace, tensors=tensors))
    first = read_factors(workload)
    with torch.no_grad():
        for parameter in workload.model.parameters():
            parameter[0] -= 0.25
    second = read_factors(workload)
    assert all(a - b > 0.05 for a, b in zip(first, second, strict=True))


def test_memory_that_is_replaced_tied_and_frozen_parameters_are_read(tmp_path: Path) -> None:
    workload = load(tmp_path, make_trace(["a.weight", "b.weight", "c.weight"], [100, 100, 100]))
    model = workload.model
    a, b, c = (model.get_submodule(name) for name in "abc")
    b.register_parameter("weight", a.get_parameter("weight"))
    c.get_parameter("weight").requires_grad_(False)
    model.double()  # in other memory
    step(workload)
    tied = a.get_parameter("weight")
    assert c.get_parameter("weight").grad is None
    assert tied.grad is not None
    first = tied.grad.clone()
    model.zero_grad(set_to_none=True)
    tied.data = tied.data + 0.1
    step(workload)
    assert not torch.equal(first, tied.grad)
    model.zero_grad(set_to_none=True)
    tied.data = tied.data - 0.1
    step(workload)
    torch.testing.assert_close(first, tied.grad)


def test_dilation_stretches_what_is_spent_and_not_what_is_planned_with(tmp_path: Path) -> None:
    workload = load(tmp_path, make_trace(["a.weight", "b.weight"]), dilation=10.0)
    assert isinstance(workload.recorded, Trace)
    assert workload.recorded.forward_s == pytest.approx(2e-4)
    assert workload.model.trace.forward_s == pytest.approx(2e-3)


def test_integer_gradients_are_refused(tmp_path: Path) -> None:
    text = json.dumps(
        {
            "schema": "testbed.trace/1",
            "name": "bytes",
            "device": "",
            "batch_size": 1,
            "tensors": [
                {
                    "name": "a.w",
                    "num_elements": 1,
                    "dtype": "uint8",
                    "forward_s": 0.0,
                    "backward_s": 0.0,
                }
            ],
        }
    )
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(UsageError, match="uint8"):
        load_workload(f"replay:{tmp_path / 't.json'}", seed=1)


def test_a_replay_is_named_without_a_key() -> None:
    assert str(parse_spec("replay:resnet50-v100")) == "replay:resnet50-v100"
    assert load_workload("replay", seed=1).recorded == owned_shipped("resnet50-v100")


def owned_shipped(name: str) -> Trace:
    workload = build_replay(name, dilation=1.0, data_dir=None, seed=2)
    assert isinstance(workload.recorded, Trace)
    return workload.recorded


@pytest.mark.parametrize(
    "spec", ["replay:nowhere.json", "replay:a,b", "replay:trace=", "resnet20:fast", "replay:x=1"]
)
def test_wrong_specifications_are_refused(spec: str) -> None:
    with pytest.raises(UsageError):
        load_workload(spec, seed=1)


def test_a_data_folder_is_refused() -> None:
    with pytest.raises(UsageError, match="no data"):
        load_workload("replay:resnet50-v100", seed=1, data_dir="/tmp")
