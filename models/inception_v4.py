"""Inception-v4: 149 convolutions in parallel paths of very different cost."""

from __future__ import annotations

from torch import nn

from .classifiers import IMAGENET, Recipe, image_classifier
from .layers import Branches, PooledClassifier, conv_bn, init_he_

Kernel = int | tuple[int, int]

_ROW: Kernel = (1, 7)
_COLUMN: Kernel = (7, 1)


def _same(in_channels: int, *steps: tuple[int, Kernel]) -> nn.Sequential:
    """Convolutions (channels, kernel) that keep the image's size."""
    layers = []
    for channels, kernel in steps:
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (height // 2, width // 2)
        layers.append(conv_bn(in_channels, channels, kernel, padding=padding, eps=1e-3))
        in_channels = channels
    return nn.Sequential(*layers)


def _valid(in_channels: int, channels: int, stride: int = 2) -> nn.Sequential:
    """A 3 x 3 convolution without padding."""
    return conv_bn(in_channels, channels, 3, stride=stride, eps=1e-3)


def _average(in_channels: int, channels: int) -> nn.Sequential:
    pool = nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)
    return nn.Sequential(pool, _same(in_channels, (channels, 1)))


def _halve() -> nn.MaxPool2d:
    return nn.MaxPool2d(3, stride=2)


def _stem() -> list[nn.Module]:
    """3 to 384 channels, 299 to 35 pixels (figure 3)."""
    return [
        _valid(3, 32),
        _valid(32, 32, stride=1),
        _same(32, (64, 3)),
        Branches(_halve(), _valid(64, 96)),
        Branches(
            nn.Sequential(_same(160, (64, 1)), _valid(64, 96, stride=1)),
            nn.Sequential(_same(160, (64, 1), (64, _ROW), (64, _COLUMN)), _valid(64, 96, stride=1)),
        ),
        Branches(_valid(192, 192), _halve()),
    ]


def _block_a() -> Branches:
    """384 channels, 35 pixels (figure 4)."""
    return Branches(
        _same(384, (96, 1)),
        _same(384, (64, 1), (96, 3)),
        _same(384, (64, 1), (96, 3), (96, 3)),
        _average(384, 96),
    )


def _reduction_a() -> Branches:
    """384 to 1024 channels, 35 to 17 pixels (figure 7)."""
    return Branches(
        _valid(384, 384),
        nn.Sequential(_same(384, (192, 1), (224, 3)), _valid(224, 256)),
        _halve(),
    )


def _block_b() -> Branches:
    """1024 channels, 17 pixels (figure 5)."""
    return Branches(
        _same(1024, (384, 1)),
        _same(1024, (192, 1), (224, _ROW), (256, _COLUMN)),
        _same(1024, (192, 1), (192, _COLUMN), (224, _ROW), (224, _COLUMN), (256, _ROW)),
        _average(1024, 128),
    )


def _reduction_b() -> Branches:
    """1024 to 1536 channels, 17 to 8 pixels (figure 8)."""
    return Branches(
        nn.Sequential(_same(1024, (192, 1)), _valid(192, 192)),
        nn.Sequential(_same(1024, (256, 1), (256, _ROW), (320, _COLUMN)), _valid(320, 320)),
        _halve(),
    )


def _fork(in_channels: int) -> Branches:
    return Branches(_same(in_channels, (256, (1, 3))), _same(in_channels, (256, (3, 1))))


def _block_c() -> Branches:
    """1536 channels, 8 pixels (figure 6)."""
    return Branches(
        _same(1536, (256, 1)),
        nn.Sequential(_same(1536, (384, 1)), _fork(384)),
        nn.Sequential(_same(1536, (384, 1), (448, (3, 1)), (512, (1, 3))), _fork(512)),
        _average(1536, 256),
    )


def inception_v4(num_classes: int, dropout: float = 0.2) -> nn.Module:
    """A stem, then 4, 7 and 3 blocks with a reduction between them (figure 9 of the paper).

        stem - 4 A - reduction A - 7 B - reduction B - 3 C - mean - linear

    Images [B, 3, S, S] to logits [B, num_classes].

    Args:
        num_classes: outputs.
        dropout: probability before the classifier.

    Raises:
        UsageError: images of fewer than 75 pixels.

    Example:
        >>> import torch
        >>> with torch.device("meta"):  # shapes alone
        ...     model = inception_v4(num_classes=1000)
        >>> sum(parameter.numel() for parameter in model.parameters())
        42679816

    Reference:
        Szegedy et al., 2017, AAAI (Inception-v4). Departs: trained with SGD at ResNet's learning
        rate, where the paper has RMSProp.
    """
    features = nn.Sequential(
        *_stem(),
        *(_block_a() for _ in range(4)),
        _reduction_a(),
        *(_block_b() for _ in range(7)),
        _reduction_b(),
        *(_block_c() for _ in range(3)),
    )
    model = PooledClassifier(features, 1536, num_classes, dropout)
    init_he_(model)
    return model


INCEPTION_V4 = image_classifier(
    "inception-v4",
    "Inception-v4 for ImageNet, images of 299 pixels (Szegedy et al., 2017)",
    inception_v4,
    images=IMAGENET,
    recipe=Recipe(learning_rate=0.025),  # the paper trains with RMSProp; this is ResNet's
    num_parameters=42_679_816,
    image_size=299,
    min_image_size=75,
    dropout=0.2,
)
