"""Sparsify gently at first: a ratio that falls to its final value in stages."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from testbed.compression.checks import require_between, require_ratio
from testbed.compression.protocol import (
    ByteRange,
    Claims,
    Compressor,
    Context,
    Conversation,
    State,
)
from testbed.errors import UsageError


def density_at(
    step: int, final: float, stage_steps: int, start: float = 0.25, factor: float = 0.25
) -> float:
    """The ratio of a step: start factor^(step // stage_steps), but never below `final`.

    Example:
        >>> [density_at(s, 0.001, 100) for s in (0, 99, 100, 399, 400)]
        [0.25, 0.25, 0.0625, 0.00390625, 0.001]

    Reference:
        Lin et al., 2018, ICLR (DGC): 25, 6.25, 1.56, 0.39, 0.1 %, an epoch each.
    """
    # From where on it is `final` anyway, the power is not needed and might underflow.
    return max(final, start * factor ** min(step // stage_steps, 1000))


@dataclass(frozen=True)
class WarmUpOptions:
    """Options of `warmup`.

    Attributes:
        stage_steps: steps of each stage.
        start: ratio of the first stage.
        factor: from one stage's ratio to the next.
    """

    stage_steps: int = 100
    start: float = 0.25
    factor: float = 0.25

    def __post_init__(self) -> None:
        require_between("warmup", "stage_steps", self.stage_steps, 1, 1e9)
        require_ratio("warmup start", self.start)
        require_between("warmup", "factor", self.factor, 0.0, 0.999)


@dataclass(frozen=True)
class WarmUp:
    """A compressor whose ratio falls from `start` to its own.

    Attributes:
        inner: any compressor with a ratio, however deep.
        options: see `WarmUpOptions`.

    Raises:
        UsageError: the inner one has no ratio.
    """

    inner: Compressor
    options: WarmUpOptions

    def __post_init__(self) -> None:
        ratio_of(self.inner)

    @property
    def claims(self) -> Claims:
        """See `Compressor.claims`."""
        return self.inner.claims

    def exchange(self, values: torch.Tensor, state: State, context: Context) -> Conversation:
        """See `Compressor.exchange`; the state is the inner one's."""
        return self._at(context.step).exchange(values, state, context)

    def payload_bytes(self, num_elements: int, element_bytes: int, context: Context) -> ByteRange:
        """See `Compressor.payload_bytes`."""
        return self._at(context.step).payload_bytes(num_elements, element_bytes, context)

    def _at(self, step: int) -> Compressor:
        o = self.options
        ratio = density_at(step, ratio_of(self.inner), o.stage_steps, o.start, o.factor)
        compressor: Compressor = with_ratio(self.inner, ratio)
        return compressor


def ratio_of(part: Any) -> float:
    """The ratio of a compressor, or of what it wraps.

    Raises:
        UsageError: none of them has one.
    """
    names = _fields(part)
    if "ratio" in names:
        return float(part.ratio)
    for name in ("inner", "codec"):
        if name in names:
            return ratio_of(getattr(part, name))
    raise UsageError(
        f"warmup needs a compressor with a ratio to its right, not {type(part).__name__}; write "
        "for example warmup+topk:ratio=0.001"
    )


def with_ratio(part: Any, ratio: float) -> Any:
    """The same compressor with another ratio, put where `ratio_of` finds it."""
    names = _fields(part)
    if "ratio" in names:
        return dataclasses.replace(part, ratio=ratio)
    name = "inner" if "inner" in names else "codec"
    return dataclasses.replace(part, **{name: with_ratio(getattr(part, name), ratio)})


def _fields(part: Any) -> set[str]:
    return {f.name for f in dataclasses.fields(part)} if dataclasses.is_dataclass(part) else set()
