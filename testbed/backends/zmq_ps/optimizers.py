"""The optimizers that a server can run over its slices, as the note of an INSTALL names them."""

from __future__ import annotations

from typing import Literal

import msgspec
import torch

from testbed.errors import UsageError


class OptimizerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the note of an INSTALL says, in JSON; the rate comes with every APPLY.

    Attributes:
        optimizer: an elementwise rule, so that slices may be updated apart from each other.
        momentum: for sgd.
        weight_decay: added to the gradient (sgd, adam) or to the parameters (adamw).
        nesterov: for sgd with momentum.
        betas: for adam and adamw.
        eps: for adam and adamw.
    """

    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


def parse_optimizer(note: str | bytes) -> OptimizerSettings:
    """The settings of an INSTALL's note; an empty note is plain SGD.

    Raises:
        UsageError: the note is no JSON, or names an optimizer or a setting that is not known.

    Example:
        >>> parse_optimizer('{"optimizer": "sgd", "momentum": 0.9}').momentum
        0.9
    """
    try:
        settings = msgspec.json.decode(note or b"{}", type=OptimizerSettings)
    except msgspec.MsgspecError as error:
        raise UsageError(
            f"optimizer note is {note!r}: {error}; expected JSON with optimizer (sgd, adam or "
            "adamw), momentum, weight_decay, nesterov, betas, eps"
        ) from error
    build(settings, torch.zeros(1))  # torch's own checks, before anything travels
    return settings


def build(settings: OptimizerSettings, parameter: torch.Tensor) -> torch.optim.Optimizer:
    """Torch's optimizer over one slice of parameters.

    Raises:
        UsageError: torch refuses the settings.
    """
    try:
        if settings.optimizer == "sgd":
            return torch.optim.SGD(
                [parameter],
                lr=0.0,
                momentum=settings.momentum,
                weight_decay=settings.weight_decay,
                nesterov=settings.nesterov,
            )
        kind = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
        return kind(
            [parameter],
            lr=0.0,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
    except ValueError as error:
        raise UsageError(f"optimizer {settings} cannot be made: {error}") from error


def step(
    optimizer: torch.optim.Optimizer,
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    learning_rate: float,
) -> None:
    """One update of a slice, in place."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    parameter.grad = gradient
    optimizer.step()
    parameter.grad = None
