"""AlexNet, the version with one column of convolutions."""

from __future__ import annotations

from torch import nn

from .checks import check_at_least
from .classifiers import IMAGENET, Recipe, image_classifier


def alexnet(num_classes: int, hidden: int = 4096, dropout: float = 0.5) -> nn.Module:
    """Five convolutions, three linear layers; images [B, 3, S, S] to logits [B, num_classes].

        conv 11x11/4, 64 - pool - conv 5x5, 192 - pool - conv 3x3, 384, 256, 256 - pool - 3 linear

    Args:
        num_classes: outputs.
        hidden: width of the two linear layers before the last.
        dropout: probability before each of these two.

    Raises:
        UsageError: `hidden` is below 1; images of fewer than 63 pixels.

    Example:
        >>> import torch
        >>> with torch.device("meta"):  # shapes alone
        ...     model = alexnet(num_classes=1000)
        >>> sum(parameter.numel() for parameter in model.parameters())
        61100840

    Reference:
        Krizhevsky, 2014, arXiv 1404.5997 ("One weird trick ..."). Departs: at image sizes other
        than 224 the last feature map is pooled to 6 x 6, so that the number of parameters stays the
        same.
    """
    check_at_least("alexnet", 1, hidden=hidden)
    return nn.Sequential(
        nn.Conv2d(3, 64, 11, stride=4, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2),
        nn.Conv2d(64, 192, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2),
        nn.Conv2d(192, 384, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(384, 256, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(256, 256, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2),
        nn.AdaptiveAvgPool2d(6),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(256 * 6 * 6, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(hidden, hidden),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, num_classes),
    )


ALEXNET = image_classifier(
    "alexnet",
    "AlexNet for ImageNet (Krizhevsky, 2014)",
    alexnet,
    images=IMAGENET,
    recipe=Recipe(learning_rate=0.005, weight_decay=5e-4),  # published: 0.01 at 128
    num_parameters=61_100_840,
    min_image_size=63,
    hidden=4096,
    dropout=0.5,
)
