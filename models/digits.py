"""Handwritten digits: real data that comes with scikit-learn, for runs of seconds.

1797 grey images of 8 x 8 (here with mean 0 and variance 1). The split is fixed and stratified by
class: 1437 images to train on, 360 to test on, whatever the seed of the run.

Reference:
    Alpaydin and Kaynak, 1998, UCI ("Optical recognition of handwritten digits", test set).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from testbed.base.axes import WorkloadFacts
from testbed.base.errors import UsageError
from testbed.base.parts import Part
from testbed.base.spec import options_class
from testbed.workloads.samples import TensorSamples
from testbed.workloads.workload import Workload

from .checks import check_at_least

_SPLIT_SEED = 0
_NUM_TEST = 360
_MEAN, _STD = 4.884, 6.017  # of the training images' values, 0 .. 16


def load_digits_split() -> tuple[TensorSamples, TensorSamples]:
    """Training and test samples: standardised images [B, 1, 8, 8] and classes [B]."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, classes = load_digits(return_X_y=True)
    parts = train_test_split(
        images, classes, test_size=_NUM_TEST, stratify=classes, random_state=_SPLIT_SEED
    )
    scaled = [(x - _MEAN) / _STD for x in parts[:2]]
    train_x, test_x = (torch.from_numpy(x).float().view(-1, 1, 8, 8) for x in scaled)
    train_y, test_y = (torch.from_numpy(y).long() for y in parts[2:])
    return TensorSamples(train_x, train_y), TensorSamples(test_x, test_y)


def _init_he_(model: nn.Module) -> nn.Module:
    """All weights from N(0, 2 / fan_in), biases 0: half the epochs that torch's defaults take."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    return model


def digits_mlp(hidden: int) -> nn.Module:
    """Two hidden layers of equal width; images [B, 1, 8, 8] to logits [B, 10].

        linear - relu - linear - relu - linear

    Args:
        hidden: width of the hidden layers, 1 or more.

    Raises:
        UsageError: a width or batch size below 1, or a data folder.

    Example:
        >>> sum(parameter.numel() for parameter in digits_mlp(hidden=128).parameters())
        26122

    Reference:
        None: a small network of our own on the digits of Alpaydin and Kaynak, 1998. Departs:
        weights are drawn from N(0, 2 / fan_in), which takes half the epochs that torch's defaults
        take.
    """
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 10),
    )
    return _init_he_(model)


def digits_cnn(width: int) -> nn.Module:
    """Two convolutions, a pooling and two linear layers; images [B, 1, 8, 8] to logits [B, 10].

        conv 3x3 - relu - conv 3x3 - relu - max pool - linear 64 - relu - linear

    No batch normalisation: every number that a step changes is a parameter, so replicas with equal
    parameters are equal altogether.

    Args:
        width: channels of the first convolution; the second has twice as many.

    Raises:
        UsageError: a width or batch size below 1, or a data folder.

    Example:
        >>> sum(parameter.numel() for parameter in digits_cnn(width=16).parameters())
        38282

    Reference:
        None: a small network of our own, after LeNet (LeCun et al., 1998). Departs: weights are
        drawn from N(0, 2 / fan_in), which takes half the epochs that torch's defaults take.
    """
    model = nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * 16, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    return _init_he_(model)


def _workload(
    model: nn.Module, batch_size: int, learning_rate: float, data_dir: str | None
) -> Workload:
    if data_dir is not None:
        raise UsageError(
            f"--data is {data_dir!r}; the digits come with scikit-learn and take no folder: "
            "leave --data out"
        )
    train, test = load_digits_split()
    return Workload(
        model=model,
        train=train,
        test=test,
        batch_size=batch_size,
        learning_rate=learning_rate,
        momentum=0.9,
        data="scikit-learn digits (real)",
    )


def _build_mlp(options: Any, *, data_dir: str | None, seed: int) -> Workload:
    check_at_least("digits-mlp", 1, **vars(options))
    return _workload(digits_mlp(options.hidden), options.batch_size, 0.05, data_dir)


def _build_cnn(options: Any, *, data_dir: str | None, seed: int) -> Workload:
    check_at_least("digits-cnn", 1, **vars(options))
    return _workload(digits_cnn(options.width), options.batch_size, 0.03, data_dir)


def _facts(options: object) -> WorkloadFacts:
    return WorkloadFacts(imports=("sklearn.datasets", "sklearn.model_selection"))


DIGITS_MLP = Part(
    name="digits-mlp",
    summary="multilayer perceptron on scikit-learn's handwritten digits (real data)",
    build=_build_mlp,
    options=options_class(hidden=128, batch_size=32),
    facts=_facts,
)

DIGITS_CNN = Part(
    name="digits-cnn",
    summary="small convolutional network on scikit-learn's handwritten digits (real data)",
    build=_build_cnn,
    options=options_class(width=16, batch_size=32),
    facts=_facts,
)
