"""GoogLeNet with batch normalisation, main classifier only."""

from __future__ import annotations

from torch import nn

from testbed.base.errors import UsageError

from .classifiers import IMAGENET, Recipe, image_classifier
from .layers import Branches, PooledClassifier, conv_bn, init_he_

_EPS = 1e-3

# Channels of each block's paths: 1x1, (reduce, 3x3), (reduce, 5x5), pool; "pool" between stages.
_BLOCKS: tuple[tuple[int, int, int, int, int, int] | None, ...] = (
    (64, 96, 128, 16, 32, 32),
    (128, 128, 192, 32, 96, 64),
    None,
    (192, 96, 208, 16, 48, 64),
    (160, 112, 224, 24, 64, 64),
    (128, 128, 256, 24, 64, 64),
    (112, 144, 288, 32, 64, 64),
    (256, 160, 320, 32, 128, 128),
    None,
    (256, 160, 320, 32, 128, 128),
    (384, 192, 384, 48, 128, 128),
)


def _inception(
    in_channels: int, widths: tuple[int, int, int, int, int, int], kernel: int
) -> Branches:
    one, reduce3, three, reduce5, five, pool = widths
    return Branches(
        conv_bn(in_channels, one, eps=_EPS),
        nn.Sequential(
            conv_bn(in_channels, reduce3, eps=_EPS),
            conv_bn(reduce3, three, 3, padding=1, eps=_EPS),
        ),
        nn.Sequential(
            conv_bn(in_channels, reduce5, eps=_EPS),
            conv_bn(reduce5, five, kernel, padding=kernel // 2, eps=_EPS),
        ),
        nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), conv_bn(in_channels, pool, eps=_EPS)),
    )


def googlenet(num_classes: int, kernel: int = 3, dropout: float = 0.2) -> nn.Module:
    """Nine inception blocks; images [B, 3, S, S] to logits [B, num_classes].

        block: [conv1x1, conv1x1 - conv3x3, conv1x1 - conv kernel^2, pool - conv1x1], concatenated

    Args:
        num_classes: outputs.
        kernel: of the third path, odd; the paper has 5.
        dropout: probability before the classifier.

    Raises:
        UsageError: an even `kernel`; images of fewer than 32 pixels.

    Example:
        >>> import torch
        >>> with torch.device("meta"):  # shapes alone
        ...     model = googlenet(num_classes=1000)
        >>> sum(parameter.numel() for parameter in model.parameters())
        6624904

    Reference:
        Szegedy et al., 2015, CVPR (GoogLeNet). Departs, as the commonly quoted count does: a batch
        normalisation after each convolution (Ioffe and Szegedy, 2015, ICML) instead of local
        response normalisation, no auxiliary classifiers, and 3 x 3 kernels where the paper has 5 x
        5 (`kernel=5` gives the paper's).
    """
    if kernel % 2 == 0 or kernel < 1:
        raise UsageError(f"googlenet: kernel is {kernel}; expected an odd number, 3 or 5")
    layers: list[nn.Module] = [
        conv_bn(3, 64, 7, stride=2, padding=3, eps=_EPS),
        nn.MaxPool2d(3, stride=2, ceil_mode=True),
        conv_bn(64, 64, eps=_EPS),
        conv_bn(64, 192, 3, padding=1, eps=_EPS),
        nn.MaxPool2d(3, stride=2, ceil_mode=True),
    ]
    channels = 192
    for widths in _BLOCKS:
        if widths is None:
            layers.append(nn.MaxPool2d(3, stride=2, ceil_mode=True))
            continue
        layers.append(_inception(channels, widths, kernel))
        channels = widths[0] + widths[2] + widths[4] + widths[5]
    model = PooledClassifier(nn.Sequential(*layers), channels, num_classes, dropout)
    init_he_(model)
    return model


GOOGLENET = image_classifier(
    "googlenet",
    "GoogLeNet with batch normalisation for ImageNet (Szegedy et al., 2015)",
    googlenet,
    images=IMAGENET,
    recipe=Recipe(learning_rate=0.01, weight_decay=2e-4),
    num_parameters=6_624_904,
    kernel=3,
    dropout=0.2,
)
