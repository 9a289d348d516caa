"""VGG-16: most of its parameters are in one layer."""

from __future__ import annotations

from torch import nn

from .checks import check_at_least
from .classifiers import IMAGENET, Recipe, image_classifier
from .layers import init_he_

_STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))  # (channels, convolutions)


def vgg16(
    num_classes: int, bn: bool = False, hidden: int = 4096, dropout: float = 0.5
) -> nn.Module:
    """Thirteen 3 x 3 convolutions in five stages, then three linear layers.

        stages of 64, 64 | 128, 128 | 256 x 3 | 512 x 3 | 512 x 3 channels, each ends in a max pool

    Images [B, 3, S, S] to logits [B, num_classes].

    Args:
        num_classes: outputs.
        bn: a batch normalisation after each convolution.
        hidden: width of the two linear layers before the last.
        dropout: probability behind each of these two.

    Raises:
        UsageError: `hidden` is below 1; images of fewer than 32 pixels.

    Example:
        >>> import torch
        >>> with torch.device("meta"):  # shapes alone
        ...     model = vgg16(num_classes=1000)
        >>> sum(parameter.numel() for parameter in model.parameters())
        138357544

    Reference:
        Simonyan and Zisserman, 2015, ICLR (configuration D). Departs: at image sizes other than 224
        the last feature map is pooled to 7 x 7, so that the number of parameters stays the same.
    """
    check_at_least("vgg16", 1, hidden=hidden)
    layers: list[nn.Module] = []
    in_channels = 3
    for channels, num_convolutions in _STAGES:
        for _ in range(num_convolutions):
            layers.append(nn.Conv2d(in_channels, channels, 3, padding=1))
            layers += [nn.BatchNorm2d(channels)] if bn else []
            layers.append(nn.ReLU(inplace=True))
            in_channels = channels
        layers.append(nn.MaxPool2d(2))
    model = nn.Sequential(
        *layers,
        nn.AdaptiveAvgPool2d(7),
        nn.Flatten(),
        nn.Linear(512 * 7 * 7, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(hidden, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(hidden, num_classes),
    )
    init_he_(model)
    return model


VGG16 = image_classifier(
    "vgg16",
    "VGG-16 for ImageNet (Simonyan and Zisserman, 2015); bn=1: with batch normalisation",
    vgg16,
    images=IMAGENET,
    recipe=Recipe(learning_rate=0.0025, weight_decay=5e-4),  # published: 0.01 at 256
    num_parameters=138_357_544,
    bn=False,
    hidden=4096,
    dropout=0.5,
)
