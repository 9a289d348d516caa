"""GoogLeNet as published and trained with Caffe: with auxiliary classifiers; for traces alone.

13,378,280 parameters in 128 tensors: biased convolutions without batch normalisation, and two
auxiliary classifiers, which hold half of the parameters. Used for traces of published measurements;
for training there is `googlenet`.

Reference:
    Szegedy et al., 2015, CVPR (GoogLeNet). Departs: without local response normalisation and
    dropout, which have no parameters.
"""

from __future__ import annotations

import torch
from torch import nn

from .layers import Branches

# Channels of each block's paths: 1x1, (reduce, 3x3), (reduce, 5x5), pool; "pool" between stages.
_BLOCKS = {
    "3a": (192, 64, 96, 128, 16, 32, 32),
    "3b": (256, 128, 128, 192, 32, 96, 64),
    "4a": (480, 192, 96, 208, 16, 48, 64),
    "4b": (512, 160, 112, 224, 24, 64, 64),
    "4c": (512, 128, 128, 256, 24, 64, 64),
    "4d": (512, 112, 144, 288, 32, 64, 64),
    "4e": (528, 256, 160, 320, 32, 128, 128),
    "5a": (832, 256, 160, 320, 32, 128, 128),
    "5b": (832, 384, 192, 384, 48, 128, 128),
}


def _conv(in_channels: int, out_channels: int, kernel: int = 1, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(in_channels, out_channels, kernel, stride, kernel // 2)
    return nn.Sequential(convolution, nn.ReLU(inplace=True))


def _pool() -> nn.MaxPool2d:
    return nn.MaxPool2d(3, stride=2, ceil_mode=True)


def _inception(name: str) -> Branches:
    channels, one, reduce3, three, reduce5, five, pool = _BLOCKS[name]
    return Branches(
        _conv(channels, one),
        nn.Sequential(_conv(channels, reduce3), _conv(reduce3, three, 3)),
        nn.Sequential(_conv(channels, reduce5), _conv(reduce5, five, 5)),
        nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), _conv(channels, pool)),
    )


def _auxiliary(in_channels: int, num_classes: int) -> nn.Sequential:
    return nn.Sequential(
        nn.AvgPool2d(5, stride=3),
        _conv(in_channels, 128),
        nn.Flatten(),
        nn.Linear(128 * 4 * 4, 1024),
        nn.ReLU(inplace=True),
        nn.Linear(1024, num_classes),
    )


class CaffeGoogLeNet(nn.Module):
    """Nine inception blocks and three classifiers, for images of 224 pixels."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            _conv(3, 64, 7, 2), _pool(), _conv(64, 64), _conv(64, 192, 3), _pool()
        )
        self.early = nn.Sequential(_inception("3a"), _inception("3b"), _pool(), _inception("4a"))
        self.first = _auxiliary(512, num_classes)
        self.middle = nn.Sequential(*(_inception(name) for name in ("4b", "4c", "4d")))
        self.second = _auxiliary(528, num_classes)
        self.late = nn.Sequential(
            _inception("4e"), _pool(), _inception("5a"), _inception("5b"), nn.AdaptiveAvgPool2d(1)
        )
        self.classifier = nn.Linear(1024, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images [B, 3, 224, 224] to the logits of the three classifiers [3, B, num_classes]."""
        early = self.early(self.stem(x))
        first = self.first(early)
        middle = self.middle(early)
        second = self.second(middle)
        last = self.classifier(torch.flatten(self.late(middle), 1))
        return torch.stack([first, second, last])
