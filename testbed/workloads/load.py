"""From what the user wrote (`resnet50:image_size=64`, `my_model.py:build`) to a workload."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import IterableDataset, TensorDataset

from testbed.base.axes import WORKLOADS
from testbed.base.errors import UsageError
from testbed.workloads.samples import DatasetSamples, TensorSamples
from testbed.workloads.user_file import check_dilation
from testbed.workloads.workload import Samples, Workload, target_of

Batch = tuple[torch.Tensor, ...]


def load_workload(
    spec_text: str, *, seed: int, data_dir: str | None = None, dilation: float = 1.0
) -> Workload:
    """The workload that a specification names, complete and ready to train.

    Torch's global generator is seeded just before the model is built, so that equal seeds give
    equal initial weights in every process.

    Args:
        spec_text: `name`, `name:key=value,...`, `file.py:function` or
            `file.py:function:key=value,...`.
        seed: of the initial weights and of synthetic samples.
        data_dir: folder of the data set; None = synthetic, or what comes with the workload.
        dilation: how many times slower than the real thing its compute is to run.

    Returns:
        The workload with its name, loss and `num_correct` filled in and its data as `Samples`.

    Raises:
        UnknownName: no such workload.
        Unavailable: it needs something that is not installed.
        UsageError: an option, the data folder or the user's own file cannot be used.

    Example:
        >>> workload = load_workload("digits-mlp:hidden=32", seed=1)
        >>> workload.name, len(workload.train), workload.batch_size
        ('digits-mlp:hidden=32', 1437, 32)
    """
    found = WORKLOADS.resolve(spec_text).usable()
    check_dilation(found, dilation)
    torch.manual_seed(seed)
    stretch = {"dilation": dilation} if found.facts.stretches else {}
    return _complete(found.build(data_dir=data_dir, seed=seed, **stretch), found.text)


def _complete(workload: Workload, name: str) -> Workload:
    if not any(parameter.requires_grad for parameter in workload.model.parameters()):
        raise UsageError(
            f"the model of {name} has no parameter with requires_grad; nothing could be trained"
        )
    return replace(
        workload,
        name=name,
        train=as_samples(workload.train, f"{name}: training data"),
        test=None if workload.test is None else as_samples(workload.test, f"{name}: test data"),
        loss=workload.loss or cross_entropy,
        num_correct=workload.num_correct or count_correct,
    )


_NUMBERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def cross_entropy(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Mean cross entropy of `model(batch[0])` [B, classes, ...] against `batch[1]` [B, ...]."""
    return functional.cross_entropy(model(batch[0]), target_of(batch))


def count_correct(model: torch.nn.Module, batch: Batch) -> float | None:
    """How often the largest of `model(batch[0])` [B, classes, ...] is at `batch[1]` [B, ...].

    A sample with several answers counts as its share of right ones. None where the largest means
    nothing: another output than a tensor of two classes or more, labels that are no numbers of
    classes, other shapes.
    """
    scores, labels = model(batch[0]), batch[1] if len(batch) > 1 else None
    if not (isinstance(scores, torch.Tensor) and isinstance(labels, torch.Tensor)):
        return None
    if scores.dim() < 2 or scores.shape[1] < 2 or labels.dtype not in _NUMBERS:
        return None
    if labels.shape != scores.shape[:1] + scores.shape[2:]:
        return None
    right = scores.argmax(dim=1) == labels
    return float(right.double().flatten(1).mean(dim=1).sum() if right.dim() > 1 else right.sum())


def as_samples(data: Any, what: str = "data") -> Samples:
    """Data in the form that the trainer reads.

    Args:
        data: `Samples`, or a map-style torch dataset; a `TensorDataset` of CPU tensors becomes one
            index select per batch, any other is collated by torch.
        what: names the data in errors.

    Raises:
        UsageError: it is neither, or it is empty.
    """
    samples = _convert(data, what)
    if len(samples) == 0:
        raise UsageError(f"{what} is empty; expected at least one sample")
    return samples


def _convert(data: Any, what: str) -> Samples:
    has_length = callable(getattr(data, "__len__", None))
    samples: Samples
    if has_length and callable(getattr(data, "batch", None)):
        samples = data
        return samples
    if type(data) is TensorDataset and all(t.device.type == "cpu" for t in data.tensors):
        samples = TensorSamples(*data.tensors)
        return samples
    if isinstance(data, IterableDataset) or not (has_length and hasattr(data, "__getitem__")):
        raise UsageError(
            f"{what} is a {type(data).__name__}; expected a map-style torch dataset with __len__ "
            "and __getitem__ (of a DataLoader give its .dataset), or an object with __len__ and "
            "batch(indices)"
        )
    samples = DatasetSamples(data)
    return samples
