"""DenseNet-161 and -201: many small layers, each of which reads the outputs of all before it."""

from __future__ import annotations

import torch
from torch import nn

from .classifiers import IMAGENET, Recipe, image_classifier
from .layers import PooledClassifier, conv_bn, init_he_


def _bn_relu_conv(in_channels: int, out_channels: int, kernel: int) -> nn.Sequential:
    return nn.Sequential(
        nn.BatchNorm2d(in_channels),
        nn.ReLU(inplace=True),
        nn.Conv2d(in_channels, out_channels, kernel, padding=kernel // 2, bias=False),
    )


class DenseLayer(nn.Module):
    """A 1 x 1 and a 3 x 3 convolution whose output is appended to the input's channels."""

    def __init__(self, in_channels: int, growth: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            _bn_relu_conv(in_channels, 4 * growth, 1), _bn_relu_conv(4 * growth, growth, 3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, C, H, W] to [B, C + growth, H, W]."""
        return torch.cat([x, self.path(x)], dim=1)


def densenet(blocks: tuple[int, ...], growth: int, num_classes: int) -> nn.Module:
    """Dense blocks; between two of them half the channels and half the image.

        layer l of a block:  x_l = conv3x3(conv1x1([x_0, ..., x_{l-1}]))  of `growth` channels

    Images [B, 3, S, S] to logits [B, num_classes].

    Args:
        blocks: layers of each block.
        growth: channels that each layer adds.
        num_classes: outputs.

    Raises:
        UsageError: images of fewer than 32 pixels.

    Example:
        >>> with torch.device("meta"):  # shapes alone
        ...     model = densenet((6, 12, 48, 32), growth=32, num_classes=1000)
        >>> sum(parameter.numel() for parameter in model.parameters())
        20013928

    Reference:
        Huang et al., 2017, CVPR (DenseNet-BC). Departs: nothing in the network; the learning rate
        is scaled to 64 images.
    """
    channels = 2 * growth
    layers: list[nn.Module] = [
        conv_bn(3, channels, 7, stride=2, padding=3),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    for number, num_layers in enumerate(blocks):
        if number > 0:
            layers += [_bn_relu_conv(channels, channels // 2, 1), nn.AvgPool2d(2)]
            channels //= 2
        for _ in range(num_layers):
            layers.append(DenseLayer(channels, growth))
            channels += growth
    layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
    model = PooledClassifier(nn.Sequential(*layers), channels, num_classes)
    init_he_(model)
    return model


def densenet161(num_classes: int) -> nn.Module:
    """`densenet` with 78 wide layers in four blocks."""
    return densenet((6, 12, 36, 24), 48, num_classes)


def densenet201(num_classes: int) -> nn.Module:
    """`densenet` with 98 layers in four blocks."""
    return densenet((6, 12, 48, 32), 32, num_classes)


_RECIPE = Recipe(learning_rate=0.025)  # published: 0.1 at 256

DENSENET161 = image_classifier(
    "densenet161",
    "DenseNet-161 for ImageNet (Huang et al., 2017)",
    densenet161,
    images=IMAGENET,
    recipe=_RECIPE,
    num_parameters=28_681_000,
)
DENSENET201 = image_classifier(
    "densenet201",
    "DenseNet-201 for ImageNet (Huang et al., 2017)",
    densenet201,
    images=IMAGENET,
    recipe=_RECIPE,
    num_parameters=20_013_928,
)
