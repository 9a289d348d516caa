import os
import pickle
import struct
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, TensorDataset

from testbed.base.errors import Unavailable, UsageError
from testbed.models.cifar10 import load_cifar10
from testbed.models.image_folder import centre_crop, load_image_folder
from testbed.models.tokens import IGNORED, HiddenTokens, NextToken, TokenWindows, synthetic_tokens
from testbed.workloads.load import load_workload
from testbed.workloads.samples import (
    DatasetSamples,
    PooledSamples,
    SubsetSamples,
    TensorSamples,
    spread_subset,
    synthetic_images,
)


def equal(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# --- samples ---


@pytest.mark.parametrize(
    "indices", [[0], [4, 1, 1], range(5), torch.tensor([3, 2]), np.array([2, 0])]
)
def test_index_select_gives_what_torchs_collate_gives(indices):
    tensors = torch.randn(5, 3, 2), torch.arange(5), torch.randn(5)
    fast, plain = TensorSamples(*tensors), DatasetSamples(TensorDataset(*tensors))
    assert len(fast) == len(plain) == 5
    assert equal(fast.batch(indices), plain.batch(indices))


@pytest.mark.parametrize("indices", [[5], [-1, 0]])
def test_indices_outside_are_refused(indices):
    for samples in (
        TensorSamples(torch.arange(5)),
        PooledSamples(5, torch.arange(2)),
    ):
        with pytest.raises(IndexError, match=r"expected 0 \.\. 4"):
            samples.batch(indices)


def test_tensors_of_unequal_length_are_refused():
    with pytest.raises(UsageError, match=r"lengths \[3, 4\]"):
        TensorSamples(torch.zeros(3), torch.zeros(4))


class Numbers(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return np.full(2, index, dtype=np.float32), index % 3


def test_a_torch_dataset_of_arrays_and_numbers_is_collated():
    x, y = DatasetSamples(Numbers()).batch([5, 2])
    assert torch.equal(x, torch.tensor([[5.0, 5.0], [2.0, 2.0]]))
    assert torch.equal(y, torch.tensor([2, 2]))


class Dicts(Numbers):
    def __getitem__(self, index):
        return {"x": index}


def test_a_dataset_of_dicts_is_refused_with_what_to_return():
    with pytest.raises(UsageError, match="Dicts collate to dict; expected tensors"):
        DatasetSamples(Dicts()).batch([0])


def test_a_spread_subset_reaches_over_the_whole_source():
    source = TensorSamples(torch.arange(100))
    some = spread_subset(source, 4)
    assert isinstance(some, SubsetSamples)
    assert some.batch([0, 1, 2, 3])[0].tolist() == [0, 25, 50, 75]
    assert some.batch([3, 0])[0].tolist() == [75, 0]
    assert spread_subset(source, 0) is source
    with pytest.raises(UsageError, match="the data set has 100"):
        spread_subset(source, 101)


def test_synthetic_images_depend_on_seed_and_index_alone():
    a, b = (synthetic_images(50_000, (3, 8, 8), 10, seed=1) for _ in range(2))
    other = synthetic_images(50_000, (3, 8, 8), 10, seed=2)
    assert len(a) == 50_000
    a.batch([7])
    assert equal(a.batch([0, 49_999]), b.batch([0, 49_999]))
    assert not equal(a.batch([0]), other.batch([0]))
    assert not equal(a.batch([0]), a.batch([1]))
    images, classes = a.batch(range(64))
    assert images.shape == (64, 3, 8, 8)
    assert images.dtype == torch.float32
    assert 0 <= classes.min() <= classes.max() < 10
    assert len(classes.unique()) > 5


def test_synthetic_images_do_not_touch_the_global_generator():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    synthetic_images(10, (3, 4, 4), 10, seed=1).batch([1])
    assert torch.equal(torch.rand(3), expected)


# --- CIFAR-10 ---


def _python2_string(text: bytes) -> bytes:
    return b"T" + struct.pack("<i", len(text)) + text


def python2_batch(images: np.ndarray, labels: list[int]) -> bytes:
    """A pickle as Python 2 wrote the archive: protocol 2, byte strings, numpy.core names."""
    shape = b"(" + b"".join(b"J" + struct.pack("<i", n) for n in images.shape) + b"t"
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01btR"
        b"(K\x01" + shape + b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89" + _python2_string(images.tobytes()) + b"tb"
    )
    numbers = b"](" + b"".join(b"K" + bytes([n]) for n in labels) + b"e"
    return b"\x80\x02}(" + b"U\x04data" + array + b"U\x06labels" + numbers + b"u."


@pytest.fixture
def cifar(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        images = rng.integers(256, size=(4, 3072), dtype=np.uint8)
        (folder / name).write_bytes(python2_batch(images, rng.integers(10, size=4).tolist()))
    return tmp_path


def test_the_test_files_are_pickles_that_numpy_itself_reads(cifar):
    path = cifar / "cifar-10-batches-py" / "data_batch_1"
    content = pickle.loads(path.read_bytes(), encoding="bytes")
    assert content[b"data"].shape == (4, 3072)


def test_cifar10_is_read_as_numpy_reads_it(cifar):
    train, test = load_cifar10(cifar)
    assert (len(train), len(test)) == (20, 4)
    path = cifar / "cifar-10-batches-py" / "data_batch_2"
    plain = pickle.loads(path.read_bytes(), encoding="bytes")
    images, classes = train.batch([4, 5, 6, 7])
    restored = images * torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)
    restored = (restored + torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)) * 255
    assert torch.equal(restored.round().byte(), torch.from_numpy(plain[b"data"]).view(4, 3, 32, 32))
    assert classes.tolist() == plain[b"labels"]


def test_a_workload_takes_cifar10_from_its_folder_or_the_one_above(cifar):
    for folder in (cifar, cifar / "cifar-10-batches-py"):
        workload = load_workload("resnet20:num_samples=5", seed=1, data_dir=str(folder))
        assert (len(workload.train), len(workload.test)) == (5, 4)
        assert workload.data == f"CIFAR-10 from {folder}"
        batch = workload.test.batch([0, 1])
        assert 0 <= workload.num_correct(workload.model, batch) <= 2


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_cifar_batch_cannot_run_code(cifar, tmp_path):
    proof = tmp_path / "proof"
    evil = pickle.dumps({"data": Evil(proof)}, protocol=2)
    pickle.loads(evil)
    assert proof.exists()  # an ordinary unpickler runs it
    proof.rmdir()
    (cifar / "cifar-10-batches-py" / "data_batch_3").write_bytes(evil)
    with pytest.raises(UsageError, match=r"data_batch_3.*mkdir, not allowed"):
        load_cifar10(cifar)
    assert not proof.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no pickle",
        pickle.dumps([1, 2]),
        pickle.dumps({b"data": 3, b"labels": [1]}),
        pickle.dumps({b"labels": [1]}),
        python2_batch(np.zeros((2, 30), np.uint8), [1, 2]),
        python2_batch(np.zeros((2, 3072), np.uint8), [1]),
        python2_batch(np.zeros((1, 3072), np.uint8), [11]),
        python2_batch(np.zeros((1, 3072), np.uint8), [1])[:1000],
    ],
)
def test_a_malformed_cifar_batch_is_named(cifar, content):
    (cifar / "cifar-10-batches-py" / "test_batch").write_bytes(content)
    with pytest.raises(UsageError, match=r"test_batch.*expected"):
        load_cifar10(cifar)


def test_a_missing_cifar_folder_or_wrong_size_is_refused(cifar, tmp_path):
    with pytest.raises(UsageError, match=r"data_batch_1 is missing; expected the unpacked"):
        load_workload("resnet20", seed=1, data_dir=str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="CIFAR-10 needs image_size=32"):
        load_workload("resnet20:image_size=64", seed=1, data_dir=str(cifar))


def test_cifar_images_without_data_are_called_synthetic():
    workload = load_workload("resnet20", seed=1)
    assert workload.data.startswith("synthetic (")
    assert workload.test is None
    assert len(workload.train) == 50_000


# --- image folders ---


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for part, per_class in (("train", 3), ("val", 1)):
        for name in ("n02", "n01"):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(per_class):
                pixels = rng.integers(256, size=(40 + 10 * i, 50, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / part / name / f"{i}.JPEG", quality=95)
    (tmp_path / "train" / "n01" / "notes.txt").write_text("no image")
    return tmp_path


def test_an_image_folder_numbers_its_classes_by_name(folder):
    train, test = load_image_folder(folder, image_size=32)
    assert (len(train), len(test)) == (6, 2)
    images, classes = train.batch(range(6))
    assert images.shape == (6, 3, 32, 32)
    assert images.dtype == torch.float32
    assert classes.tolist() == [0, 0, 0, 1, 1, 1]
    assert equal(train.batch([3, 1]), (images[[3, 1]], classes[[3, 1]]))
    assert -2.2 < images.min() < 0 < images.max() < 2.7


@pytest.mark.parametrize(("width", "height"), [(500, 300), (300, 500), (100, 100), (7, 90)])
def test_the_crop_is_central_and_square(width, height):
    rows = np.linspace(0, 255, height).astype(np.uint8)[:, None].repeat(width, axis=1)
    crop = centre_crop(Image.fromarray(rows).convert("RGB"), 224)
    assert crop.size == (224, 224)
    column = np.asarray(crop)[:, 100, 0].astype(int)
    assert abs(column[0] + column[-1] - 255) <= 3  # as much cut above as below
    if height == width:
        assert column[0] == pytest.approx(255 * 16 / 256, abs=3)


def test_grey_images_and_palettes_become_three_channels(folder):
    Image.fromarray(np.full((40, 40), 128, np.uint8)).save(folder / "val" / "n01" / "0.JPEG")
    images, _ = load_image_folder(folder, image_size=32)[1].batch([0])
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    assert torch.allclose(images[0, :, 5, 5], (128 / 255 - mean) / std, atol=0.02)


def test_a_workload_takes_an_image_folder(folder):
    spec = "googlenet:image_size=32,num_classes=2"
    workload = load_workload(spec, seed=1, data_dir=str(folder))
    assert (len(workload.train), len(workload.test)) == (6, 2)
    assert workload.loss(workload.model, workload.train.batch([0, 5])).isfinite()


def test_a_malformed_image_folder_is_refused(folder, tmp_path):
    with pytest.raises(UsageError, match=r"train/<class>/ is missing; expected train/<class>"):
        load_image_folder(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="add the option num_classes=2"):
        load_image_folder(folder, num_classes=1)
    (folder / "val" / "n03").mkdir()
    with pytest.raises(UsageError, match="the class 'n03', which"):
        load_image_folder(folder)


def test_class_folders_without_images_are_refused(folder):
    for path in folder.glob("val/*/*.JPEG"):
        path.unlink()
    with pytest.raises(UsageError, match="val' holds no images"):
        load_image_folder(folder)


def test_a_broken_image_file_is_named(folder):
    (folder / "train" / "n01" / "1.JPEG").write_bytes(b"\xff\xd8 no image")
    train, _ = load_image_folder(folder, image_size=32)
    with pytest.raises(UsageError, match=r"1\.JPEG' cannot be read"):
        train.batch([0, 1])


def test_without_pil_the_image_folder_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(Unavailable, match="pip install pillow"):
        load_image_folder(folder)


# --- tokens ---


@pytest.fixture
def token_folder(tmp_path):
    (np.arange(103) + 110).astype("<u2").tofile(tmp_path / "train.bin")
    return tmp_path


def test_token_windows_follow_each_other_and_shift_by_one(token_folder):
    windows = TokenWindows(token_folder, 10, vocabulary_size=500)
    assert len(windows) == 10
    assert windows.batch([9, 0])[0].tolist() == [list(range(200, 210)), list(range(110, 120))]
    inputs, targets = NextToken(windows).batch([1])
    assert inputs.tolist() == [list(range(120, 129))]
    assert targets.tolist() == [list(range(121, 130))]


def test_a_bad_token_file_is_refused(token_folder, tmp_path):
    with pytest.raises(UsageError, match=r"holds token 119; the model's vocabulary_size is 115"):
        TokenWindows(token_folder, 10, vocabulary_size=115).batch([0])
    with pytest.raises(UsageError, match="has 103 tokens; expected a file of at least 104"):
        TokenWindows(token_folder, 104, vocabulary_size=500)
    with pytest.raises(UsageError, match=r"train\.bin has 0 tokens"):
        TokenWindows(tmp_path / "nowhere", 4, vocabulary_size=500)


def test_hidden_tokens_depend_on_seed_and_index_alone():
    def hidden(seed):
        return HiddenTokens(synthetic_tokens(1000, 40, 500, seed=1), mask_token=103, seed=seed)

    inputs, targets = hidden(1).batch([3, 999])
    assert equal((inputs[1:], targets[1:]), hidden(1).batch([999]))
    assert not equal(hidden(1).batch([3]), hidden(2).batch([3]))
    chosen = targets != IGNORED
    assert chosen.sum(dim=1).tolist() == [6, 6]  # 15 % of 40
    assert (inputs[chosen] == 103).all()
    (tokens,) = synthetic_tokens(1000, 40, 500, seed=1).batch([3, 999])
    assert torch.equal(torch.where(chosen, targets, inputs), tokens)


@pytest.mark.parametrize("name", ["gpt2", "bert-base"])
def test_language_models_read_a_token_file(name, token_folder):
    tiny = "sequence_length=10,hidden_size=16,num_layers=1,num_heads=2,vocabulary_size=500"
    workload = load_workload(f"{name}:{tiny}", seed=1, data_dir=str(token_folder))
    assert workload.data == f"tokens from {token_folder}"
    assert workload.loss(workload.model, workload.train.batch([0, 1])).isfinite()


def test_digits_take_no_folder(tmp_path):
    with pytest.raises(UsageError, match="leave --data out"):
        load_workload("digits-cnn", seed=1, data_dir=str(tmp_path))
