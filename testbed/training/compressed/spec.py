"""What compresses the messages of a session, and which sessions it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from testbed.backends.protocol import Backend
from testbed.base.axes import COMPRESSORS
from testbed.base.config import RunConfig
from testbed.base.errors import UsageError
from testbed.base.plan import Plan
from testbed.base.types import IN_STEP, Op
from testbed.compression.common import ratio_of, with_ratio
from testbed.compression.protocol import Compressor


@dataclass(frozen=True)
class Compression:
    """A compressor with what it needs of the run.

    Attributes:
        text: its specification.
        compressor: the same on all ranks.
        seed: of the run.
        compared_steps: in so many first steps the mean is compared with the true one, which costs
            an exchange of all gradients.
    """

    text: str
    compressor: Compressor
    seed: int = 0
    compared_steps: int = 0

    @property
    def note(self) -> str:
        """What is done for the compressor beside the exchange."""
        if not self.compressor.claims.carries_momentum:
            return ""
        return "momentum is the compressor's own; the optimizer has none"


def compression_of(text: str, seed: int, compared_steps: int = 0) -> Compression | None:
    """What a specification asks for; None = gradients travel as they are.

    Raises:
        UnknownName, UsageError: see `Axis.resolve`.

    Example:
        >>> compression_of("none", 1), compression_of("ef+topk:ratio=0.1", 1).text
        (None, 'ef+topk:ratio=0.1')
    """
    if text == COMPRESSORS.default:
        return None
    return Compression(text, COMPRESSORS.resolve(text).build(), seed, compared_steps)


def compressors_of(
    compression: Compression, plan: Plan, keys: Sequence[str]
) -> dict[str, Compressor]:
    """The compressor of each message: where the plan gives a message a ratio, with that ratio.

    Args:
        compression: what was asked for.
        plan: to be carried out.
        keys: names of its messages.

    Raises:
        UsageError: the plan has ratios and the compressor has none.
    """
    own = compression.compressor
    if any(message.ratio is not None for message in plan.messages):
        try:
            ratio_of(own)
        except UsageError as error:
            raise UsageError(
                f"scheduler {plan.scheduler!r} gives each message a ratio, and compressor "
                f"{compression.text!r} has none; use another scheduler, or a compressor with a "
                "ratio, as ef+topk"
            ) from error
    return {
        key: own if message.ratio is None else with_ratio(own, message.ratio)
        for key, message in zip(keys, plan.messages, strict=True)
    }


def refuse_ratios(plan: Plan) -> None:
    """A plan that says what share of each message travels, where nothing can be left out.

    Raises:
        UsageError: names the scheduler.
    """
    if any(message.ratio is not None for message in plan.messages):
        raise UsageError(
            f"scheduler {plan.scheduler!r} plans for sparse messages, and nothing is compressed; "
            "give --compressor with a ratio, as ef+topk, or use another scheduler"
        )


def without_own_momentum(config: RunConfig) -> RunConfig:
    """The configuration without the optimizer's momentum where the compressor does it.

    Example:
        >>> without_own_momentum(RunConfig(compressor="dgc", momentum=0.9)).momentum
        0.0
    """
    compression = compression_of(config.compressor, config.seed)
    if compression is None or not compression.compressor.claims.carries_momentum:
        return config
    return msgspec.structs.replace(config, momentum=0.0)


def refuse_unfit(
    compression: Compression,
    backend: Backend,
    named: Sequence[tuple[str, torch.Tensor]],
    optimizer: torch.optim.Optimizer,
    check_finite: bool,
) -> None:
    """What cannot be compressed.

    Args:
        compression: what was asked for.
        backend: opened.
        named: the parameters that are trained.
        optimizer: theirs.
        check_finite: see `Session`.

    Raises:
        UsageError: names the compressor, and what does not go with it.
    """
    what, capabilities = f"compressor {compression.text!r}", backend.capabilities
    if Op.APPLY in capabilities.ops:
        raise UsageError(
            f"{what} delivers means to the workers, but with update=server the optimizer is on the "
            "servers and takes gradients as they are; use update=worker"
        )
    if capabilities.consistency not in IN_STEP:
        raise UsageError(
            f"{what} needs all ranks in the same step, and this backend's consistency is "
            f"{capabilities.consistency}; use consistency=bsp"
        )
    if not check_finite:
        raise UsageError(
            f"{what} cannot stand beside a gradient scaler, whose scale would stay in what is kept "
            "from step to step; use bf16 or float32, and leave check_finite on"
        )
    for name, parameter in named:
        if not parameter.is_floating_point():
            raise UsageError(
                f"{what} takes real floating-point gradients, and {name!r} is {parameter.dtype}; "
                f"use --compressor {COMPRESSORS.default}"
            )
    if compression.compressor.claims.carries_momentum:
        _refuse_momentum(what, optimizer)


def _refuse_momentum(what: str, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        if "betas" in group or group.get("momentum", 0):
            kind = type(optimizer).__name__
            given = f"betas={group['betas']}" if "betas" in group else f"{group['momentum']}"
            raise UsageError(
                f"{what} does the momentum itself, and {kind} has its own ({given}); use SGD with "
                "momentum=0, or give the compressor momentum=0"
            )
