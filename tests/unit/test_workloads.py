import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from testbed.base.axes import WORKLOADS
from testbed.base.errors import Unavailable, UnknownName, UsageError
from testbed.workloads.load import as_samples, count_correct, load_workload
from testbed.workloads.samples import DatasetSamples, TensorSamples
from testbed.workloads.user_file import EXAMPLE, parse_own_model, surely_lacks

# --- registered workloads ---


def test_options_are_converted_to_the_types_of_their_defaults():
    spec = "vgg16:bn=1,hidden=8,dropout=0.25,image_size=32,num-classes=3,num_samples=7"
    workload = load_workload(spec, seed=1)
    kinds = [type(m) for m in workload.model.modules()]
    assert torch.nn.BatchNorm2d in kinds
    assert {m.p for m in workload.model.modules() if isinstance(m, torch.nn.Dropout)} == {0.25}
    assert workload.model(workload.train.batch([0, 6])[0]).shape == (2, 3)
    assert len(workload.train) == 7
    assert workload.name == spec


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("resnet20:colour=1", "known options: batch_size, image_size, num_classes, num_samples"),
        ("resnet20:batch_size=many", "batch_size is 'many'; expected a whole number"),
        ("vgg16:bn=perhaps", "bn is 'perhaps'; expected 1 or 0"),
        ("resnet20:batch_size", "is not key=value"),
    ],
)
def test_wrong_options_are_refused(spec, message):
    with pytest.raises(UsageError, match=message):
        load_workload(spec, seed=1)


def test_an_unknown_workload_lists_the_known_ones():
    with pytest.raises(UnknownName, match="did you mean 'resnet50'"):
        load_workload("resnet-50", seed=1)


def test_a_workload_whose_library_is_missing_says_what_to_install(monkeypatch):
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "transformers" else 1
    )
    assert WORKLOADS.load("gpt2").probe() == (
        "transformers is not installed",
        "pip install 'testbed[transformers]'",
    )
    with pytest.raises(Unavailable, match=r"pip install 'testbed\[transformers\]'"):
        load_workload("gpt2", seed=1)


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_every_workload_is_available_where_the_extras_are_installed(name):
    found = WORKLOADS.resolve(name).usable()
    assert found.part.name == name
    assert found.part.summary
    # What is recorded has the batch size that it was recorded with.
    assert found.facts.stretches or found.options.batch_size > 0


def test_the_default_loss_and_count_are_those_of_a_classifier():
    workload = load_workload("digits-mlp", seed=1)
    x, y = workload.train.batch(range(10))
    logits = workload.model(x)
    assert torch.equal(
        workload.loss(workload.model, (x, y)), torch.nn.functional.cross_entropy(logits, y)
    )
    assert workload.num_correct(workload.model, (x, y)) == sum(
        int(row.argmax()) == int(label) for row, label in zip(logits, y, strict=True)
    )


# --- datasets ---


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class Rescaled(TensorDataset):
    def __getitem__(self, index):
        return tuple(t * 2 for t in super().__getitem__(index))


def test_only_a_plain_tensor_dataset_takes_the_fast_path():
    x = torch.arange(4.0)
    assert isinstance(as_samples(TensorDataset(x)), TensorSamples)
    scaled = as_samples(Rescaled(x))
    assert isinstance(scaled, DatasetSamples)
    assert scaled.batch([3])[0].tolist() == [6.0]
    samples = TensorSamples(x)
    assert as_samples(samples) is samples


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Endless(), "is a Endless; expected a map-style"),
        (DataLoader(TensorDataset(torch.zeros(3))), r"is a DataLoader; expected .* give its"),
        (7, "is a int; expected"),
        (TensorDataset(torch.zeros(0)), "is empty"),
    ],
)
def test_other_data_is_refused(data, message):
    with pytest.raises(UsageError, match=message):
        as_samples(data)


# --- the user's own model ---

OWN = """
import torch
from helper_of_my_model import make_data
from testbed.workloads.workload import Workload

class NotAModel:
    pass

def build(width: int = 4, bias: bool = True, rate=0.5, mode: str | None = None, *, seed, data_dir):
    model = torch.nn.Linear(width, 3, bias=bias)
    workload = Workload(model, make_data(width), learning_rate=rate, data=f"{mode} {data_dir}")
    workload.model.seed = seed
    return workload

def pair(width):
    return torch.nn.Linear(int(width), 3), make_data(int(width))

def with_function(width: int = 4):
    return (*pair(width), lambda model, batch: model(batch[0]).square().mean())

def with_criterion(width: int = 4):
    x = torch.randn(8, width)
    dataset = torch.utils.data.TensorDataset(x, x[:, :3])
    return torch.nn.Linear(width, 3), dataset, torch.nn.MSELoss()

def number():
    return 7

def four():
    return 1, 2, 3, 4

def no_model():
    return NotAModel(), make_data(4)

def no_loss():
    return (*pair(4), "mse")

def two_sets():
    return (*pair(4), make_data(4))

def frozen():
    model, data = pair(4)
    return model.requires_grad_(False), data

def odd(sizes: list[int] = (1, 2)):
    return pair(4)

def broken():
    return [][1]

constant = 3
"""

HELPER = """
import torch

def make_data(width):
    return torch.utils.data.TensorDataset(torch.randn(8, width), torch.arange(8) % 3)
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "my_model.py").write_text(OWN)
    (tmp_path / "helper_of_my_model.py").write_text(HELPER)
    yield str(tmp_path / "my_model.py")
    sys.modules.pop("helper_of_my_model", None)


def test_an_own_workload_gets_its_options_seed_and_folder(own):
    spec = f"{own}:build:width=6,bias=0,rate=0.125,mode=fast"
    path = list(sys.path)
    workload = load_workload(spec, seed=11, data_dir="somewhere")
    assert sys.path == path
    assert workload.model.weight.shape == (3, 6)
    assert workload.model.bias is None
    assert workload.model.seed == 11
    assert workload.learning_rate == 0.125
    assert workload.data == "fast somewhere"
    assert workload.name == spec
    assert isinstance(workload.train, TensorSamples)
    assert workload.loss(workload.model, workload.train.batch([0, 1])).isfinite()


def test_an_own_model_may_be_a_pair_and_is_seeded(own):
    first, again, other = (
        load_workload(f"{own}:pair:width=5", seed=seed).model.weight for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert load_workload(f"{own}:pair:width=5", seed=1).data == "user's own"


def test_an_own_loss_is_a_function_of_model_and_batch_or_a_criterion(own):
    workload = load_workload(f"{own}:with_function", seed=1)
    x, y = workload.train.batch([0, 1])
    assert torch.equal(workload.loss(workload.model, (x, y)), workload.model(x).square().mean())
    workload = load_workload(f"{own}:with_criterion", seed=1)
    x, y = workload.train.batch([0, 1])
    assert torch.equal(
        workload.loss(workload.model, (x, y)), (workload.model(x) - y).square().mean()
    )


@pytest.mark.parametrize(
    ("tail", "message"),
    [
        ("", r"expected a file and a function in it: .*my_model\.py:build"),
        (":", "expected a file and a function"),
        (":absent", r"no function 'absent'; it has: .*build, .*def build\(width"),
        (":constant", "no function 'constant'"),
        (":pair", r"needs width; write .*:pair:width=\.\.\."),
        (":build:colour=red", "known options: bias, mode, rate, width"),
        (":build:seed=3", "has no option 'seed'"),
        (":build:width=wide", "width is 'wide'; expected a whole number"),
        (":odd:sizes=3", "option 'sizes' of odd is annotated"),
        (":number", r"returned a int; expected a function that returns a model and a dataset"),
        (":four", "returned a tuple of 4"),
        (":no_model", "returned a NotAModel as the model"),
        (":no_loss", "returned a str as the loss"),
        (":two_sets", "returned a TensorDataset as the loss"),
        (":frozen", "no parameter with requires_grad"),
    ],
)
def test_own_models_that_cannot_be_used_are_refused(own, tail, message):
    with pytest.raises(UsageError, match=f"(?s){message}"):
        load_workload(own + tail, seed=1)


def test_a_missing_file_is_refused_with_an_example(tmp_path):
    with pytest.raises(UsageError, match="there is no file"):
        load_workload(f"{tmp_path}/nowhere.py:build", seed=1)


def test_a_data_folder_that_nobody_takes_is_refused(own):
    with pytest.raises(UsageError, match=r"pair in .* takes no data_dir"):
        load_workload(f"{own}:pair:width=3", seed=1, data_dir="somewhere")


def test_errors_of_the_users_code_come_through_with_a_note(own):
    with pytest.raises(IndexError) as caught:
        load_workload(f"{own}:broken", seed=1)
    assert "my_model.py:broken" in caught.value.__notes__[0]


def test_a_file_with_a_syntax_error_leaves_nothing_behind(tmp_path):
    (tmp_path / "torn.py").write_text("def build(:\n")
    with pytest.raises(SyntaxError):
        load_workload(f"{tmp_path}/torn.py:build", seed=1)
    assert not [name for name in sys.modules if "torn" in name]


def test_the_example_in_the_messages_works(tmp_path):
    text = "\n".join(line[4:] for line in EXAMPLE.splitlines())
    assert len(text.splitlines()) == 5
    (tmp_path / "example.py").write_text(text)
    workload = load_workload(f"{tmp_path}/example.py:build:width=16", seed=1)
    assert workload.loss(workload.model, workload.train.batch([0, 5])).isfinite()


def test_names_without_a_python_file_are_registered_ones():
    assert parse_own_model("resnet50:image_size=64") is None
    assert parse_own_model("a/b.py:make:x=1").options == {"x": "1"}


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("def build():\n    return 1\n", False),
        ("def built():\n    return 1\n", True),
        ("from nets import make as build\n", False),
        ("from nets import *\n", False),
        ("globals()['bu' + 'ild'] = print\n", False),
        ("for n in 'ab': locals()[n] = print\n", False),
        ("if True:\n    build = lambda: 1\n", False),
        ("class Net:\n    def built(self): ...\n", True),
        ("def broken(:\n", False),
    ],
)
def test_a_function_that_a_file_surely_lacks_is_refused_unrun(
    text: str, refused: bool, tmp_path: Path
) -> None:
    file = tmp_path / "my_model.py"
    file.write_text(f"{text}\nraise RuntimeError('this was run')\n" if "(:" not in text else text)
    own = parse_own_model(f"{file}:build")
    if not refused:
        assert surely_lacks(own) is None
        return
    told = surely_lacks(own)
    assert "has no function 'build'; it has: " in told
    assert ("did you mean 'built'" in told) == text.startswith("def built")


@pytest.mark.parametrize(
    ("text", "options", "refused"),
    [
        ("def build(width: int = 3): ...\n", "width=4", ""),
        ("def build(width: int = 3): ...\n", "widht=4", "no option 'widht'.*did you mean 'width'"),
        ("def build(width: int = 3, *, seed=1): ...\n", "seed=4", "no option 'seed'.*: width$"),
        ("def build(w): ...\nif __name__ == '__main__':\n    build(1)\n", "v=4", "no option 'v'"),
        ("def build(**given): ...\n", "v=4", ""),
        ("@make\ndef build(): ...\n", "v=4", ""),
        ("def build(): ...\nbuild = other\n", "v=4", ""),
        ("def build(): ...\nexec('')\n", "v=4", ""),
        ("import sys\ndef build(): ...\nsys.modules[__name__].build = other\n", "v=4", ""),
        ("def build(): ...\nbuild.__signature__ = other\n", "v=4", ""),
        ("def build(): ...\nother.build = more\n", "v=4", ""),
        ("def build(): ...\nmatch more:\n    case {'b': build}: pass\n", "v=4", ""),
        ("def build(): ...\nnet.eval()\n", "v=4", "no option 'v'"),
        ("build = lambda: 1\n", "v=4", ""),
    ],
)
def test_an_option_that_a_function_surely_does_not_take_is_refused_unrun(
    text: str, options: str, refused: str, tmp_path: Path
) -> None:
    file = tmp_path / "my_model.py"
    file.write_text(f"{text}\nraise RuntimeError('this was run')\n")
    told = surely_lacks(parse_own_model(f"{file}:build:{options}"))
    assert re.search(refused, told) if refused else told is None


def scores(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("output", "batch"),
    [
        (scores(4), (None, torch.zeros(4))),  # a regression
        (scores(4, 1), (None, torch.zeros(4, 1))),  # one logit
        (scores(4, 3), (None, torch.zeros(4))),  # labels that are no numbers of classes
        (scores(4, 3), (None, torch.zeros(4, 3, dtype=torch.int64))),
        ((scores(4, 3),), (None, torch.zeros(4, dtype=torch.int64))),
        (scores(4, 3), (None,)),
    ],
)
def test_where_the_largest_means_nothing_there_is_no_accuracy(output, batch):
    assert count_correct(lambda inputs: output, batch) is None


def test_a_sample_of_several_answers_counts_as_its_share_of_right_ones():
    output, labels = scores(4, 3, 5), torch.randint(0, 3, (4, 5))
    right = (output.argmax(dim=1) == labels).float()
    found = count_correct(lambda inputs: output, (None, labels))
    assert found == pytest.approx(float(right.mean(dim=1).sum()))


def test_an_own_loss_may_be_a_function_of_torch_and_annotations_for_checkers_alone(own, tmp_path):
    text = """
from __future__ import annotations
import torch
from typing import TYPE_CHECKING
from torch.utils.data import TensorDataset
if TYPE_CHECKING:
    from elsewhere import Pair

def build(width: int = 4, other: Pair | None = None) -> Pair:
    x = torch.randn(8, width)
    return torch.nn.Linear(width, 3), TensorDataset(x, x[:, :3]), torch.nn.functional.mse_loss

def alone(width: int = 4):
    return torch.nn.Linear(width, 3), TensorDataset(torch.randn(8, width))
"""
    (tmp_path / "typed.py").write_text(text)
    workload = load_workload(f"{tmp_path}/typed.py:build:width=5", seed=1)
    x, y = workload.train.batch([0, 1])
    expected = (workload.model(x) - y).square().mean()
    assert torch.equal(workload.loss(workload.model, (x, y)), expected)
    with pytest.raises(UsageError, match="option 'other' of build is annotated"):
        load_workload(f"{tmp_path}/typed.py:build:other=1", seed=1)
    workload = load_workload(f"{tmp_path}/typed.py:alone", seed=1)
    with pytest.raises(UsageError, match=r"samples have one field.* \(input, target\)"):
        workload.loss(workload.model, workload.train.batch([0]))
