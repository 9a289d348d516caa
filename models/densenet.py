"""DenseNet-201 (Huang et al., 2017): many small layers, each fed with all before it."""

from __future__ import annotations

import torch
from torch import nn

from .classifiers import IMAGENET, Recipe, image_classifier
from .layers import PooledClassifier, conv_bn, init_he_

_GROWTH = 32  # channels that each layer adds
_BLOCKS = (6, 12, 48, 32)


def _bn_relu_conv(in_channels: int, out_channels: int, kernel: int) -> nn.Sequential:
    return nn.Sequential(
        nn.BatchNorm2d(in_channels),
        nn.ReLU(inplace=True),
        nn.Conv2d(in_channels, out_channels, kernel, padding=kernel // 2, bias=False),
    )


class DenseLayer(nn.Module):
    """A 1 x 1 and a 3 x 3 convolution whose output is appended to the input's channels."""

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            _bn_relu_conv(in_channels, 4 * _GROWTH, 1), _bn_relu_conv(4 * _GROWTH, _GROWTH, 3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, C, H, W] to [B, C + growth, H, W]."""
        return torch.cat([x, self.path(x)], dim=1)


def densenet201(num_classes: int) -> nn.Module:
    """Four dense blocks; between two of them half the channels and half the image."""
    layers: list[nn.Module] = [
        conv_bn(3, 2 * _GROWTH, 7, stride=2, padding=3),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    channels = 2 * _GROWTH
    for number, num_layers in enumerate(_BLOCKS):
        if number > 0:
            layers += [_bn_relu_conv(channels, channels // 2, 1), nn.AvgPool2d(2)]
            channels //= 2
        for _ in range(num_layers):
            layers.append(DenseLayer(channels))
            channels += _GROWTH
    layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
    model = PooledClassifier(nn.Sequential(*layers), channels, num_classes)
    init_he_(model)
    return model


DENSENET201 = image_classifier(
    "densenet201",
    "DenseNet-201 for ImageNet (Huang et al., 2017)",
    densenet201,
    images=IMAGENET,
    recipe=Recipe(learning_rate=0.025),  # published: 0.1 at 256
    num_parameters=20_013_928,
)
