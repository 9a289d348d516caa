"""CIFAR-10 from the folder `cifar-10-batches-py` of the python archive (Krizhevsky, 2009).

The batches are pickles, and a pickle can name any function to be called. These are read by an
unpickler that knows three names, all of which it answers with the small classes below.

No augmentation: each sample is a function of its index alone.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from testbed.base.errors import UsageError
from testbed.workloads.samples import Batch, TensorSamples

FOLDER = "cifar-10-batches-py"
_TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))
_TEST = ("test_batch",)
_MEAN = (0.4914, 0.4822, 0.4465)  # per channel, of the training images in 0 .. 1
_STD = (0.2470, 0.2435, 0.2616)


class ByteImages:
    """Images kept as bytes and normalised batch by batch: a quarter of the memory of floats."""

    def __init__(
        self,
        images: torch.Tensor,
        classes: torch.Tensor,
        mean: Sequence[float] = _MEAN,
        std: Sequence[float] = _STD,
    ) -> None:
        self.bytes = TensorSamples(images, classes)
        self._mean = torch.tensor(mean, device="cpu").view(1, -1, 1, 1)
        self._std = torch.tensor(std, device="cpu").view(1, -1, 1, 1)

    def __len__(self) -> int:
        return len(self.bytes)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Normalised images [B, 3, 32, 32] and classes [B]."""
        images, classes = self.bytes.batch(indices)
        return (images.float().div_(255) - self._mean) / self._std, classes


def load_cifar10(
    folder: Path, image_size: int = 32, num_classes: int = 10
) -> tuple[ByteImages, ByteImages]:
    """Training and test images.

    Args:
        folder: `cifar-10-batches-py`, or the folder that holds it.
        image_size: must be 32, the size of the images.
        num_classes: classes of the model, at least 10.

    Raises:
        UsageError: the folder is missing or malformed, or a size does not fit.
    """
    if image_size != 32 or num_classes < 10:
        raise UsageError(
            f"image_size is {image_size} and num_classes {num_classes}; CIFAR-10 needs "
            "image_size=32 and num_classes=10; leave both out"
        )
    inner = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    missing = [n for n in (*_TRAIN, *_TEST) if not (inner / n).is_file()]
    if missing:
        raise UsageError(
            f"--data is '{folder}', where {missing[0]} is missing; expected the unpacked "
            f"'cifar-10-python.tar.gz': a folder {FOLDER} with data_batch_1 .. 5 and test_batch"
        )
    return _read_all(inner, _TRAIN), _read_all(inner, _TEST)


def _read_all(folder: Path, names: Sequence[str]) -> ByteImages:
    parts = [_read_batch(folder / name) for name in names]
    images = np.concatenate([images for images, _ in parts])
    classes = np.concatenate([classes for _, classes in parts])
    return ByteImages(torch.from_numpy(images), torch.from_numpy(classes))


def _read_batch(path: Path) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    try:
        content = BatchUnpickler(path.read_bytes()).load()
        data = content[b"data"].to_numpy()
        classes = np.asarray(content[b"labels"], dtype=np.int64)
        images = data.reshape(len(classes), 3, 32, 32)
    except (
        pickle.UnpicklingError,
        AttributeError,
        EOFError,
        IndexError,
        KeyError,
        TypeError,
        ValueError,
    ) as error:
        raise UsageError(
            f"'{path}' is no batch of CIFAR-10 ({type(error).__name__}: {error}); expected the "
            "pickled dict of the python archive with b'data' [N, 3072] and b'labels' [N]"
        ) from error
    if classes.size and not (classes.min() >= 0 and classes.max() < 10):
        raise UsageError(f"'{path}' has labels outside 0 .. 9; expected classes of CIFAR-10")
    return images, classes


class BatchUnpickler(pickle.Unpickler):
    """Reads dicts, lists, strings, numbers and arrays of bytes; refuses every other name."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="bytes")

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """The stand-in of an allowed name.

        Raises:
            pickle.UnpicklingError: the pickle asks for anything else.
        """
        allowed = {
            ("numpy.core.multiarray", "_reconstruct"): lambda *_: _PickledArray(),
            ("numpy._core.multiarray", "_reconstruct"): lambda *_: _PickledArray(),
            ("numpy", "ndarray"): _PickledArray,
            ("numpy", "dtype"): _PickledDtype,
        }
        if (module_name, global_name) not in allowed:
            raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}, not allowed")
        return allowed[module_name, global_name]


class _PickledDtype:
    """A dtype as the pickle describes it: a code such as `u1`, then a state that we ignore."""

    def __init__(self, code: bytes | str, *rest: object) -> None:
        self.code = code.decode() if isinstance(code, bytes) else code

    def __setstate__(self, state: object) -> None:
        pass  # byte order and fields: a dtype of one byte has neither


class _PickledArray:
    """An array as the pickle describes it: (version, shape, dtype, is_fortran, raw bytes)."""

    def __setstate__(self, state: tuple[int, tuple[int, ...], _PickledDtype, bool, bytes]) -> None:
        _, self.shape, dtype, is_fortran, self.raw = state
        if dtype.code != "u1" or is_fortran:
            raise pickle.UnpicklingError("an array is not of unsigned bytes in C order")

    def to_numpy(self) -> np.ndarray[Any, Any]:
        """The array, writable."""
        return np.frombuffer(self.raw, dtype=np.uint8).reshape(self.shape).copy()
