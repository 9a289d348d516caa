"""Random numbers that depend on run, message, step and rank, and on nothing else."""

from __future__ import annotations

import hashlib

import torch

from testbed.compression.protocol import Context


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
    """Uniform in [0, 1), one for each value, other ones on each rank; float32, or float64 for it.

    Example:
        >>> uniform(torch.zeros(3), Context()).shape
        torch.Size([3])
    """
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    draw = generator(context, shared=False, device=values.device)
    return torch.rand(values.shape, generator=draw, device=values.device, dtype=dtype)
