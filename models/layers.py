"""Building blocks that several architectures share, and the initial weights of image models."""

from __future__ import annotations

import torch
from torch import nn


def conv_bn(
    in_channels: int,
    out_channels: int,
    kernel: int | tuple[int, int] = 1,
    *,
    stride: int = 1,
    padding: int | tuple[int, int] = 0,
    eps: float = 1e-5,
    relu: bool = True,
) -> nn.Sequential:
    """A convolution without bias, batch normalisation and (unless told otherwise) a ReLU.

    The bias is left out because the normalisation would cancel it.

    Example:
        >>> sum(p.numel() for p in conv_bn(3, 8, 3).parameters())  # 3 * 8 * 9 + 2 * 8
        232
    """
    layers: list[nn.Module] = [
        nn.Conv2d(in_channels, out_channels, kernel, stride=stride, padding=padding, bias=False),
        nn.BatchNorm2d(out_channels, eps=eps),
    ]
    return nn.Sequential(*layers, nn.ReLU(inplace=True)) if relu else nn.Sequential(*layers)


class Branches(nn.Module):
    """Several paths over one input; their outputs are stacked along the channels."""

    def __init__(self, *paths: nn.Module) -> None:
        super().__init__()
        self.paths = nn.ModuleList(paths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images [B, C, H, W] to [B, sum of the paths' channels, H', W']."""
        return torch.cat([path(x) for path in self.paths], dim=1)


class PooledClassifier(nn.Module):
    """Convolutional features, averaged over the image, then one linear layer."""

    def __init__(
        self, features: nn.Module, num_features: int, num_classes: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.features = features
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(num_features, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images [B, C, H, W] to logits [B, num_classes]."""
        pooled = self.features(x).mean(dim=(2, 3))
        logits: torch.Tensor = self.classifier(self.dropout(pooled))
        return logits


def init_he_(model: nn.Module) -> None:
    """Draw the weights of all convolutions from N(0, 2 / fan_out), from torch's global generator.

    Biases of convolutions become 0; linear and normalisation layers keep torch's defaults.

    Reference:
        He et al., 2015, "Delving deep into rectifiers".
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
