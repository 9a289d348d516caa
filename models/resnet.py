"""Residual networks for CIFAR-10 (20, 56, 110 layers) and ImageNet (50, 101, 152 layers)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from .classifiers import CIFAR10, IMAGENET, Recipe, image_classifier
from .layers import PooledClassifier, conv_bn, init_he_


class PadShortcut(nn.Module):
    """Option A: every `stride`-th pixel, and zeros for the channels that are missing."""

    def __init__(self, extra_channels: int, stride: int) -> None:
        super().__init__()
        self.extra_channels = extra_channels
        self.stride = stride

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, C, H, W] to [B, C + extra, H / stride, W / stride]."""
        thinned = x[:, :, :: self.stride, :: self.stride]
        return functional.pad(thinned, (0, 0, 0, 0, 0, self.extra_channels))


class Residual(nn.Module):
    """relu(path(x) + shortcut(x))."""

    def __init__(self, path: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.path = path
        self.shortcut = shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, C, H, W] to [B, C', H', W']."""
        return functional.relu(self.path(x) + self.shortcut(x), inplace=True)


def basic_block(in_channels: int, channels: int, stride: int) -> Residual:
    """Two 3 x 3 convolutions, shortcut without parameters."""
    path = nn.Sequential(
        conv_bn(in_channels, channels, 3, stride=stride, padding=1),
        conv_bn(channels, channels, 3, padding=1, relu=False),
    )
    same = stride == 1 and in_channels == channels
    return Residual(path, nn.Identity() if same else PadShortcut(channels - in_channels, stride))


def bottleneck_block(in_channels: int, channels: int, stride: int) -> Residual:
    """1 x 1, 3 x 3 and 1 x 1 convolutions to four times the channels, projection if needed."""
    out_channels = 4 * channels
    path = nn.Sequential(
        conv_bn(in_channels, channels),
        conv_bn(channels, channels, 3, stride=stride, padding=1),
        conv_bn(channels, out_channels, relu=False),
    )
    if stride == 1 and in_channels == out_channels:
        return Residual(path, nn.Identity())
    return Residual(path, conv_bn(in_channels, out_channels, stride=stride, relu=False))


def cifar_resnet(depth: int, num_classes: int) -> nn.Module:
    """ResNet of 6n + 2 layers for small images [B, 3, S, S], to logits [B, num_classes].

        block: y = relu(conv3x3(relu(conv3x3(x))) + shortcut(x));  stages of 16, 32 and 64 channels

    Args:
        depth: 6n + 2, as 20, 56 or 110.
        num_classes: outputs.

    Raises:
        UsageError: images of fewer than 4 pixels.

    Example:
        >>> with torch.device("meta"):  # shapes alone
        ...     model = cifar_resnet(20, num_classes=10)
        >>> sum(parameter.numel() for parameter in model.parameters())
        269722

    Reference:
        He et al., 2016, CVPR (option A: shortcuts without parameters; 0.27, 0.85 and 1.7 million
        parameters, here 269,722, 853,018 and 1,727,962). Departs: no augmentation of the images.
    """
    layers: list[nn.Module] = [conv_bn(3, 16, 3, padding=1)]
    in_channels = 16
    for stage, channels in enumerate((16, 32, 64)):
        for block in range((depth - 2) // 6):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(basic_block(in_channels, channels, stride))
            in_channels = channels
    model = PooledClassifier(nn.Sequential(*layers), in_channels, num_classes)
    init_he_(model)
    return model


def imagenet_resnet(blocks: tuple[int, int, int, int], num_classes: int) -> nn.Module:
    """ResNet of bottleneck blocks for images [B, 3, S, S], to logits [B, num_classes].

        block: y = relu(conv1x1(relu(conv3x3(relu(conv1x1(x))))) + shortcut(x))
        stages of 256, 512, 1024 and 2048 channels

    Args:
        blocks: number of them in each stage.
        num_classes: outputs.

    Raises:
        UsageError: images of fewer than 32 pixels.

    Example:
        >>> with torch.device("meta"):  # shapes alone
        ...     model = imagenet_resnet((3, 4, 6, 3), num_classes=1000)
        >>> sum(parameter.numel() for parameter in model.parameters())
        25557032

    Reference:
        He et al., 2016, CVPR (option B: projections where the shape changes). Departs as most
        implementations do: a stage halves the image in its 3 x 3 convolution, not in the first 1 x
        1 one, with as many parameters.
    """
    layers: list[nn.Module] = [
        conv_bn(3, 64, 7, stride=2, padding=3),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    in_channels = 64
    for stage, num_blocks in enumerate(blocks):
        channels = 64 * 2**stage
        for block in range(num_blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(bottleneck_block(in_channels, channels, stride))
            in_channels = 4 * channels
    model = PooledClassifier(nn.Sequential(*layers), in_channels, num_classes)
    init_he_(model)
    return model


def resnet20(num_classes: int) -> nn.Module:
    """`cifar_resnet` of 20 layers."""
    return cifar_resnet(20, num_classes)


def resnet56(num_classes: int) -> nn.Module:
    """`cifar_resnet` of 56 layers."""
    return cifar_resnet(56, num_classes)


def resnet110(num_classes: int) -> nn.Module:
    """`cifar_resnet` of 110 layers."""
    return cifar_resnet(110, num_classes)


def resnet50(num_classes: int) -> nn.Module:
    """`imagenet_resnet` of 50 layers."""
    return imagenet_resnet((3, 4, 6, 3), num_classes)


def resnet101(num_classes: int) -> nn.Module:
    """`imagenet_resnet` of 101 layers."""
    return imagenet_resnet((3, 4, 23, 3), num_classes)


def resnet152(num_classes: int) -> nn.Module:
    """`imagenet_resnet` of 152 layers."""
    return imagenet_resnet((3, 8, 36, 3), num_classes)


_SMALL = Recipe(learning_rate=0.05)  # published: 0.1 at 128
_LARGE = Recipe(learning_rate=0.025)  # published: 0.1 at 256

RESNET20 = image_classifier(
    "resnet20",
    "ResNet-20 for CIFAR-10 (He et al., 2016)",
    resnet20,
    images=CIFAR10,
    recipe=_SMALL,
    num_parameters=269_722,
    image_size=32,
    min_image_size=4,
)
RESNET56 = image_classifier(
    "resnet56",
    "ResNet-56 for CIFAR-10 (He et al., 2016)",
    resnet56,
    images=CIFAR10,
    recipe=_SMALL,
    num_parameters=853_018,
    image_size=32,
    min_image_size=4,
)
RESNET110 = image_classifier(
    "resnet110",
    "ResNet-110 for CIFAR-10 (He et al., 2016)",
    resnet110,
    images=CIFAR10,
    recipe=_SMALL,
    num_parameters=1_727_962,
    image_size=32,
    min_image_size=4,
)
RESNET50 = image_classifier(
    "resnet50",
    "ResNet-50 for ImageNet (He et al., 2016)",
    resnet50,
    images=IMAGENET,
    recipe=_LARGE,
    num_parameters=25_557_032,
)
RESNET101 = image_classifier(
    "resnet101",
    "ResNet-101 for ImageNet (He et al., 2016)",
    resnet101,
    images=IMAGENET,
    recipe=_LARGE,
    num_parameters=44_549_160,
)
RESNET152 = image_classifier(
    "resnet152",
    "ResNet-152 for ImageNet (He et al., 2016)",
    resnet152,
    images=IMAGENET,
    recipe=_LARGE,
    num_parameters=60_192_808,
)
