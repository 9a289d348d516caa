"""AlexNet, the one-column version (Krizhevsky, 2014, "One weird trick ...").

Departs at image sizes other than 224: the last feature map is pooled to 6 x 6, so that the count
stays the same.
"""

from __future__ import annotations

from torch import nn

from .checks import check_at_least
from .classifiers import IMAGENET, Recipe, image_classifier


def alexnet(num_classes: int, hidden: int = 4096, dropout: float = 0.5) -> nn.Module:
    """Five convolutions, three linear layers."""
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
