"""What compressors share: state, checks, counts and random numbers."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from typing import Any

import torch

from testbed.base.errors import NonFiniteGradient, UsageError
from testbed.compression.protocol import Context, State


def num_bytes(state: State) -> int:
    """Bytes of all tensors of a state.

    Example:
        >>> import torch
        >>> num_bytes({"residual": torch.zeros(3)})
        12
    """
    return sum(t.numel() * t.element_size() for t in state.values())


def nested(name: str, state: State) -> State:
    """A wrapped compressor's state under a name of its own.

    Example:
        >>> import torch
        >>> list(nested("inner", {"u": torch.zeros(1)}))
        ['inner.u']
    """
    return {f"{name}.{key}": tensor for key, tensor in state.items()}


def taken_from(name: str, state: State) -> State:
    """What `nested` put under the name.

    Example:
        >>> import torch
        >>> list(taken_from("inner", {"inner.u": torch.zeros(1), "residual": torch.zeros(1)}))
        ['u']
    """
    prefix = f"{name}."
    return {key.removeprefix(prefix): t for key, t in state.items() if key.startswith(prefix)}


# Checks of values and options.


def require_form(values: torch.Tensor, context: Context) -> None:
    """One contiguous dimension of floating-point numbers.

    Raises:
        UsageError: another shape or dtype.

    Example:
        >>> require_form(torch.ones(2), Context())
    """
    if values.dim() != 1 or not values.is_contiguous() or not values.is_floating_point():
        raise UsageError(
            f"message {context.key!r} has shape {tuple(values.shape)}, strides {values.stride()} "
            f"and dtype {values.dtype}; expected one contiguous dimension of floating-point "
            "numbers; flatten it"
        )


def require_values(values: torch.Tensor, context: Context) -> None:
    """One contiguous dimension of finite floating-point numbers.

    One pass over the memory: a sum is finite when all terms are, unless it overflows.

    Raises:
        UsageError: another shape or dtype.
        NonFiniteGradient: NaN or infinity; names message, step and rank.

    Example:
        >>> require_values(torch.ones(2), Context())
    """
    require_form(values, context)
    wide = torch.float64 if values.dtype == torch.float64 else torch.float32
    if math.isfinite(float(values.sum(dtype=wide))) or bool(torch.isfinite(values).all()):
        return
    count = int((~torch.isfinite(values)).sum())
    raise NonFiniteGradient(
        f"message {context.key!r} holds {count} NaN or infinite of {values.numel()} values in step "
        f"{context.step} on rank {context.rank}; lower the learning rate or clip the gradients"
    )


def require_ratio(part: str, ratio: float) -> None:
    """0 < ratio <= 1.

    Raises:
        UsageError: it is not.

    Example:
        >>> require_ratio("topk", 0.01)
    """
    if not 0 < ratio <= 1:
        percent = f"; for {ratio:g} % write {ratio / 100:g}" if 1 < ratio <= 100 else ""
        raise UsageError(f"{part} ratio is {ratio:g}; expected 0 < ratio <= 1{percent}")


def require_between(part: str, name: str, value: float, least: float, most: float) -> None:
    """`least` <= value <= `most`.

    Raises:
        UsageError: it is not.

    Example:
        >>> require_between("qsgd", "bits", 4, 2, 8)
    """
    if not least <= value <= most:
        raise UsageError(f"{part} {name} is {value:g}; expected {least:g} to {most:g}")


def count_of(ratio: float, num_elements: int) -> int:
    """How many elements a ratio selects: k = max(1, ceil(ratio n)), 0 of none.

    Example:
        >>> count_of(0.01, 25_000), count_of(0.01, 3), count_of(0.3, 10), count_of(0.5, 0)
        (250, 1, 3, 0)
    """
    exact = ratio * num_elements
    # 0.07 * 100 is 7.000000000000001: rounding up must not follow the error of the product.
    return min(num_elements, max(1, math.ceil(exact - 1e-9 * exact))) if num_elements else 0


# Random numbers that depend on run, message, step and rank alone.


def generator(context: Context, *, shared: bool, device: torch.device | str) -> torch.Generator:
    """A generator for one exchange of one message.

    Args:
        context: its seed, key and step, and its rank unless `shared`.
        shared: all ranks draw the same numbers (on devices of one type).
        device: where the numbers are drawn.

    Example:
        >>> a, b = (generator(Context(rank=r), shared=True, device="cpu") for r in (0, 1))
        >>> bool(torch.rand(1, generator=a) == torch.rand(1, generator=b))
        True
    """
    who = "all" if shared else str(context.rank)
    text = f"{context.seed}/{context.step}/{who}/{context.key}"
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    return torch.Generator(device).manual_seed(seed >> 1)


def uniform(values: torch.Tensor, context: Context) -> torch.Tensor:
    """Uniform draws in [0, 1) like `values`, different on each rank; float32, of float64 float64.

    Example:
        >>> uniform(torch.zeros(3), Context()).shape
        torch.Size([3])
    """
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    draw = generator(context, shared=False, device=values.device)
    return torch.rand(values.shape, generator=draw, device=values.device, dtype=dtype)


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
