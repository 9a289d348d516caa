"""A trace holds what a step did, in the order of the model, and the model does not notice."""

import pytest
import torch
from torch import nn

from testbed.base.errors import UsageError
from testbed.base.files import decode_trace, encode_trace
from testbed.profiling.overhead import Step, training_step
from testbed.profiling.recorder import record_trace
from testbed.profiling.survey import backward_times_s, forward_shares_s, survey_step


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Shuffled(nn.Module):
    """Layers defined in another order than they run in; a tied, a borrowed and an unused one."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(4, 4)
        self.last = nn.Linear(8, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.borrowed = nn.Linear(8, 8)
        self.first = nn.Linear(8, 8, bias=False)
        self.drop = nn.Dropout(0.5)
        self.last.weight = self.first.weight

    def forward(self, x):
        hidden = self.drop(torch.relu(self.norm(self.first(x))))
        hidden = nn.functional.linear(hidden, self.borrowed.weight, self.borrowed.bias)
        return self.last(hidden)


def step_of(model, width=8, batch_size=6):
    x = torch.randn(batch_size, width, generator=torch.Generator().manual_seed(1))
    return Step(lambda: model(x).square().mean())


def record(model, step, **options):
    given = {"warmup": 1, "repeats": 3, **options}
    return record_trace(model, step, name="toy", device="cpu", batch_size=6, **given)


def test_tensors_stand_in_forward_order_once_and_the_unused_last():
    model = Shuffled()
    trace = record(model, step_of(model))
    names = [t.name for t in trace.tensors]
    # `first.weight` is known to the model by its earlier name, as everywhere in torch.
    assert names[:3] == ["last.weight", "norm.weight", "norm.bias"]
    assert sorted(names[3:5]) == ["borrowed.bias", "borrowed.weight"]
    assert names[5:] == ["unused.weight", "unused.bias"]
    assert [t.num_elements for t in trace.tensors[-2:]] == [16, 4]
    assert all(t.backward_s == t.forward_s == 0 for t in trace.tensors[-2:])


def test_times_add_up_to_the_measured_totals():
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 2))
    trace = record(model, step_of(model))
    recorded = trace.extra["recorded"]
    assert trace.forward_s == pytest.approx(recorded["forward_s"])
    assert trace.backward_s == pytest.approx(recorded["backward_s"])
    assert all(t.forward_s >= 0 and t.backward_s >= 0 for t in trace.tensors)
    by_name = {t.name: t for t in trace.tensors}
    assert all(
        by_name[f"{i}.weight"].forward_s > 0 == by_name[f"{i}.bias"].forward_s for i in (0, 2)
    )
    assert recorded["repeats"] == 3
    assert recorded["unhooked_forward_s"] > 0
    assert 0 < recorded["loss_s"] < trace.forward_s


def test_a_slow_layer_has_the_time_that_it_takes():
    class Slow(nn.Linear):
        def forward(self, x):
            for _ in range(3000):  # far more than all the rest, also in a bad moment
                x = x + 0.0
            return super().forward(x)

    model = nn.Sequential(nn.Linear(8, 8), Slow(8, 8), nn.Linear(8, 8))
    trace = record(model, step_of(model), repeats=5)
    by_name = {t.name: t for t in trace.tensors}
    # The slow part of `1` runs backward after the gradients of `1` are ready: it delays `0`.
    assert by_name["1.weight"].forward_s > trace.forward_s / 2
    assert sum(by_name[n].backward_s for n in ("0.weight", "0.bias")) > trace.backward_s / 2


def test_the_model_is_left_as_it_was():
    model = Shuffled()
    model.first.weight.grad = torch.full((8, 8), 7.0)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    random_state = torch.get_rng_state()
    record(model, step_of(model))
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.equal(model.first.weight.grad, torch.full((8, 8), 7.0))
    assert model.norm.weight.grad is None
    hooks = [
        hooks
        for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
    ]
    assert not any(hooks)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_an_error_in_the_step_leaves_no_hooks():
    model = nn.Sequential(nn.Linear(8, 8))

    def fail(loss):
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        survey_step(model, Step(lambda: model(torch.ones(1, 8)).sum(), fail))
    assert not model._forward_pre_hooks
    assert not model[0].weight._post_accumulate_grad_hooks


def test_activation_bytes_of_leaf_layers():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LSTM(16, 4))
    step = Step(lambda: model(torch.ones(6, 8))[0].sum())
    found = record(model, step).extra["activation_bytes"]
    assert found == {"0": 6 * 16 * 4, "1": 6 * 16 * 4, "2": (6 * 4 + 4 + 4) * 4}


def test_attention_whose_inner_layer_is_never_called():
    model = nn.MultiheadAttention(8, 2)
    x = torch.ones(3, 2, 8)
    trace = record(model, Step(lambda: model(x, x, x)[0].square().sum()))
    names = [t.name for t in trace.tensors]
    assert names[:2] == ["in_proj_weight", "in_proj_bias"]
    assert sorted(names[2:]) == ["out_proj.bias", "out_proj.weight"]


def test_a_trace_survives_a_file():
    model = Shuffled()
    trace = record(model, training_step(lambda batch: model(*batch).sum(), (torch.ones(6, 8),)))
    assert decode_trace(encode_trace(trace)) == trace


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: nn.Linear(8, 8), {"repeats": 0}, "repeats is 0"),
        (lambda: nn.Linear(8, 8), {"warmup": -1}, "warmup -1"),
        (lambda: nn.Linear(8, 8, dtype=torch.complex64), {}, "is of complex64"),
    ],
)
def test_what_cannot_be_recorded_is_refused(make, options, message):
    model = make()
    x = torch.ones(6, 8, dtype=model.weight.dtype)
    with pytest.raises(UsageError, match=message):
        record(model, Step(lambda: model(x).abs().sum()), **options)


def test_a_step_without_gradients_is_refused():
    model = nn.Linear(8, 8)
    other = torch.ones(1, requires_grad=True)
    with pytest.raises(UsageError, match="gave no parameter"):
        record(model, Step(lambda: (other * 2).sum()))


def test_medians_of_moments_add_up():
    nan = float("nan")
    shares = forward_shares_s([[1, 2, 5], [1, 3, 4], [1, nan, 9]], [10, 11, 12])
    assert shares.tolist() == [2, 3, 6]
    times = backward_times_s([[9, 5, 6, nan], [8, 5, 4, nan], [7, 6, 4, nan]], [10, 10, 10])
    assert times.tolist() == [4, 2, 4, 0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible")
def test_a_gpu_is_timed_by_its_own_events():
    model = nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048)).cuda()
    x = torch.ones(512, 2048, device="cuda")
    trace = record_trace(
        model,
        Step(lambda: model(x).square().mean()),
        name="toy",
        device="cuda",
        batch_size=512,
        repeats=5,
    )
    recorded = trace.extra["recorded"]
    assert trace.forward_s == pytest.approx(recorded["forward_s"])
    assert trace.backward_s == pytest.approx(recorded["backward_s"])
    assert all(t.backward_s > 0 for t in trace.tensors if t.name.endswith("weight"))
