"""Gradient values that cost little to make, differ between tensors, and can be made again."""

from __future__ import annotations

import struct

import torch

# Prime, so that no slice or shard of a usual size repeats another one's values; and small enough
# to stay in a cache, so that filling a gradient costs its own memory traffic and no more.
PATTERN_ELEMENTS = 262_147


def shift_of(sample: float) -> int:
    """How far the gradients of a batch are shifted along the pattern, by one of its samples.

    Workers have other batches, so that their largest elements lie elsewhere, as unlike as those of
    noise: what sparse payloads of several workers have in common is only by chance.

    Example:
        >>> shift_of(0.25) == shift_of(0.25), shift_of(0.25) == shift_of(0.25000001)
        (True, False)
    """
    (bits,) = struct.unpack("<q", struct.pack("<d", sample))
    # Mixed, for numbers that are close to each other differ in few bits.
    return int(bits * 0x9E3779B97F4A7C15 % (1 << 64) >> 20) % PATTERN_ELEMENTS


class Values:
    """A fixed pattern of normal noise, cut and scaled into tensors of any size.

    Element j of tensor i is `scale * pattern[(10 007 i + shift + j) mod P]`, P = 262 147.

    Args:
        seed: of the pattern.

    Example:
        >>> values = Values(seed=1)
        >>> tensor = torch.empty(4)
        >>> values.fill(tensor, number=0, scale=2.0)
        >>> torch.equal(tensor, 2 * values.pattern(torch.float32, tensor.device)[:4])
        True
    """

    def __init__(self, seed: int) -> None:
        generator = torch.Generator("cpu").manual_seed(seed)
        self._pattern = torch.randn(PATTERN_ELEMENTS, generator=generator, device="cpu")
        self._cast: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def pattern(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The pattern [P] in a dtype, on a device."""
        key = (dtype, device)
        if key not in self._cast:
            self._cast[key] = self._pattern.to(device, dtype)
        return self._cast[key]

    @torch.no_grad()
    def fill(self, tensor: torch.Tensor, number: int, scale: float, shift: int = 0) -> None:
        """Overwrite a contiguous tensor with the values of tensor `number`, times `scale`."""
        flat = tensor.view(-1)
        pattern = self.pattern(flat.dtype, flat.device)
        start, offset = 0, (number * 10_007 + shift) % PATTERN_ELEMENTS
        while start < len(flat):
            length = min(len(flat) - start, PATTERN_ELEMENTS - offset)
            torch.mul(pattern[offset : offset + length], scale, out=flat[start : start + length])
            start, offset = start + length, 0
