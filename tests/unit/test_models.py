import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from testbed.base.axes import WORKLOADS
from testbed.base.errors import UsageError
from testbed.models.layers import Branches, conv_bn
from testbed.models.resnet import PadShortcut
from testbed.workloads.load import load_workload
from testbed.workloads.workload import Workload

# Counts as published by the papers or the reference implementations.
PUBLISHED = {
    "resnet20": 269_722,
    "resnet56": 853_018,
    "resnet110": 1_727_962,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "vgg16": 138_357_544,
    "densenet161": 28_681_000,
    "densenet201": 20_013_928,
    "inception-v4": 42_679_816,
    "googlenet": 6_624_904,
    "alexnet": 61_100_840,
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "gpt2": 124_439_808,
}
# Multiply-adds of one image at its usual size: strides and poolings, which no count shows.
BILLION_MULTIPLICATIONS = {
    "resnet20": 0.0406,
    "resnet56": 0.1255,
    "resnet110": 0.2529,
    "resnet50": 4.09,
    "resnet101": 7.80,
    "resnet152": 11.51,
    "vgg16": 15.47,
    "densenet161": 7.73,
    "densenet201": 4.29,
    "inception-v4": 12.28,
    "googlenet": 1.50,
    "alexnet": 0.714,
}
VISION = [name for name in PUBLISHED if name not in ("bert-base", "bert-large", "gpt2")]

TINY_TEXT = "sequence_length=12,hidden_size=32,num_layers=2,num_heads=2,vocabulary_size=200"
SMALLEST = {
    "digits-mlp": "",
    "digits-cnn": "",
    "resnet20": "image_size=8",
    "resnet50": "image_size=32,num_classes=10",
    "vgg16": "image_size=32,num_classes=10,hidden=64",
    "densenet161": "image_size=32,num_classes=10",
    "densenet201": "image_size=32,num_classes=10",
    "inception-v4": "image_size=75,num_classes=10",
    "googlenet": "image_size=32,num_classes=10",
    "alexnet": "image_size=63,num_classes=10,hidden=64",
    "bert-base": TINY_TEXT,
    "gpt2": TINY_TEXT,
}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def smallest(name: str, seed: int = 1, **more: object) -> Workload:
    options = ",".join(filter(None, [SMALLEST[name], *(f"{k}={v}" for k, v in more.items())]))
    return load_workload(f"{name}:{options}" if options else name, seed=seed)


def on_meta(name: str, **options: object) -> Workload:
    chosen = ",".join(f"{key}={value}" for key, value in options.items())
    found = WORKLOADS.resolve(f"{name}:{chosen}")
    with torch.device("meta"):
        workload: Workload = found.build(data_dir=None, seed=1)
    return workload


def num_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_every_registered_workload_has_a_count_or_bundled_data():
    assert set(WORKLOADS) >= set(PUBLISHED) | {"digits-mlp", "digits-cnn"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name):
    assert num_parameters(on_meta(name).model) == PUBLISHED[name]
    assert WORKLOADS.resolve(name).facts.num_parameters == PUBLISHED[name]


def test_vgg16_with_batch_normalisation_has_the_published_count():
    assert num_parameters(on_meta("vgg16", bn=True).model) == 138_365_992


def test_googlenet_with_the_papers_kernels_is_larger():
    # 25 instead of 9 weights for each pair of channels in the third path of the nine blocks
    pairs = 16 * 32 + 32 * 96 + 16 * 48 + 2 * 24 * 64 + 32 * 64 + 2 * 32 * 128 + 48 * 128
    assert num_parameters(on_meta("googlenet", kernel=5).model) == 6_624_904 + 16 * pairs


def test_inception_v4_has_149_convolutions():
    model = on_meta("inception-v4").model
    assert sum(isinstance(module, nn.Conv2d) for module in model.modules()) == 149


@pytest.mark.parametrize("name", VISION)
def test_multiplications_for_one_full_size_image_are_the_published_ones(name):
    workload = on_meta(name)
    images = workload.train.batch([0])[0].to("meta")
    with FlopCounterMode(display=False) as counter:
        logits = workload.model(images)
    assert logits.shape == (1, WORKLOADS.resolve(name).options.num_classes)
    published = BILLION_MULTIPLICATIONS[name]
    assert counter.get_total_flops() / 2e9 == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize("name", [*VISION, "bert-base", "gpt2"])
def test_parameters_are_registered_in_the_order_of_use(name):
    workload = on_meta(name) if name in VISION else smallest(name)
    model = workload.model
    used: list[str] = []

    def note(module_name):
        return lambda module, args: used.append(module_name)

    for module_name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_pre_hook(note(module_name))
    model(workload.train.batch([0, 1])[0].to(next(model.parameters()).device))
    owners = list(dict.fromkeys(n.rpartition(".")[0] for n, _ in model.named_parameters()))
    # Embeddings are summed in any order, and BERT's last bias stands above the layer that adds it.
    free = {o for o in owners if o.endswith(("_embeddings", ".wte", ".wpe", ".predictions"))}
    wanted = [owner for owner in owners if owner not in free]
    assert [owner for owner in dict.fromkeys(used) if owner in wanted] == wanted
    assert len(free) <= 4


@pytest.mark.parametrize("name", SMALLEST)
def test_one_step_reaches_every_parameter(name):
    workload = smallest(name)
    loss = workload.loss(workload.model, workload.train.batch(range(2)))
    loss.backward()
    assert loss.isfinite()
    for parameter_name, parameter in workload.model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name
    assert any(p.grad.abs().max() > 0 for p in workload.model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["digits-cnn", "resnet20", "googlenet", "bert-base", "gpt2"])
def test_the_models_dtype_is_the_logits_dtype(name, dtype):
    workload = smallest(name)
    model = workload.model.to(dtype)
    batch = tuple(t.to(dtype) if t.is_floating_point() else t for t in workload.train.batch([0, 1]))
    assert model(batch[0]).dtype == dtype
    loss = workload.loss(model, batch)
    loss.backward()
    assert loss.dtype == dtype


@pytest.mark.parametrize("name", ["digits-mlp", "digits-cnn", "resnet20", "googlenet", "gpt2"])
def test_the_seed_alone_decides_the_initial_weights(name):
    torch.manual_seed(99)
    first = smallest(name, seed=3).model.state_dict()
    torch.rand(7)
    again = smallest(name, seed=3, batch_size=5).model.state_dict()
    other = smallest(name, seed=4).model.state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


def test_the_number_of_samples_does_not_change_the_weights():
    few = load_workload("resnet20:image_size=8,num_samples=3", seed=1).model.state_dict()
    many = load_workload("resnet20:image_size=8,num_samples=300", seed=1).model.state_dict()
    assert all(torch.equal(few[key], many[key]) for key in few)


def accuracy(workload: Workload) -> float:
    with torch.no_grad():
        batch = workload.test.batch(range(len(workload.test)))
        return workload.num_correct(workload.model, batch) / len(workload.test)


def train(workload: Workload, num_epochs: int, batch_size: int, seed: int = 0) -> None:
    optimizer = torch.optim.SGD(
        workload.model.parameters(), workload.learning_rate, workload.momentum
    )
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_epochs):
        order = torch.randperm(len(workload.train), generator=generator)
        for indices in order.split(batch_size)[: len(order) // batch_size]:
            optimizer.zero_grad()
            workload.loss(workload.model, workload.train.batch(indices)).backward()
            optimizer.step()


@pytest.mark.parametrize(("name", "target"), [("digits-cnn", 0.96), ("digits-mlp", 0.93)])
def test_digits_are_learnt_in_a_few_epochs(name, target):
    workload = load_workload(name, seed=1)
    assert accuracy(workload) < 0.4
    train(workload, num_epochs=6, batch_size=2 * workload.batch_size)
    assert accuracy(workload) >= target


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [64, 128])
@pytest.mark.parametrize("seed", range(1, 6))
def test_digits_cnn_reaches_97_percent(seed, batch_size):
    workload = load_workload("digits-cnn", seed=seed)
    reached = 0.0
    for epoch in range(10):
        train(workload, 1, batch_size, seed=100 * seed + epoch)
        reached = max(reached, accuracy(workload))
    assert reached >= 0.97


def test_digits_split_is_fixed_stratified_and_disjoint():
    one, two = (load_workload("digits-mlp", seed=seed) for seed in (1, 2))
    assert (len(one.train), len(one.test)) == (1437, 360)
    for part in ("train", "test"):
        a, b = getattr(one, part), getattr(two, part)
        assert all(
            torch.equal(x, y)
            for x, y in zip(a.batch(range(len(a))), b.batch(range(len(b))), strict=True)
        )
    assert one.test.batch(range(360))[1].bincount().min() >= 34
    rows = {tuple(x.flatten().tolist()) for x in one.train.batch(range(1437))[0]}
    assert not any(tuple(x.flatten().tolist()) in rows for x in one.test.batch(range(360))[0])
    assert one.data == "scikit-learn digits (real)"


def test_pad_shortcut_keeps_pixels_and_adds_zero_channels():
    x = torch.arange(2 * 4 * 4.0).view(1, 2, 4, 4)
    y = PadShortcut(extra_channels=3, stride=2)(x)
    assert y.shape == (1, 5, 2, 2)
    assert torch.equal(y[:, :2], x[:, :, ::2, ::2])
    assert not y[:, 2:].any()


def test_branches_stack_channels_in_order():
    branches = Branches(nn.Identity(), conv_bn(2, 3), nn.Identity())
    x = torch.randn(2, 2, 4, 4)
    y = branches(x)
    assert y.shape == (2, 7, 4, 4)
    assert torch.equal(y[:, :2], x)
    assert torch.equal(y[:, 5:], x)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("inception-v4:image_size=64", "expected 75 or more"),
        ("resnet20:num_classes=0", "expected 1 or more"),
        ("vgg16:num_samples=-1", "expected 0 or more"),
        ("alexnet:batch_size=0", "expected 1 or more"),
        ("digits-cnn:width=0", "expected 1 or more"),
        ("googlenet:kernel=4", "expected an odd number"),
        ("gpt2:sequence_length=2000", "expected at most 1024"),
        ("bert-base:hidden_size=100,num_heads=12", "expected a multiple of num_heads"),
        ("bert-base:vocabulary_size=50", "expected 104 or more"),
    ],
)
def test_options_that_cannot_work_are_refused(spec, message):
    with pytest.raises(UsageError, match=message):
        load_workload(spec, seed=1)


def test_bert_and_gpt2_share_their_vocabulary_matrix():
    for name, inner in (("gpt2", "transformer.wte"), ("bert-base", "bert.embeddings")):
        model = smallest(name).model.inner
        embedding = model.get_input_embeddings().weight
        assert model.get_output_embeddings().weight is embedding, inner
