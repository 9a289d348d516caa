"""Gradient values: cheap, different for each tensor, reproducible, and of what was read."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import SupportsFloat

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


# Elements of a parameter that its gradient depends on, and how strongly; see `Readings`.
NUM_READ = 64
SENSITIVITY = 4.0


class Readings:
    """How far parameters have moved from where they started, by a few of their elements.

        m_i(theta) = sum over k of w_k theta_i[k s]    s = ceil(n_i / 64), k = 0 ... K - 1
        factor_i   = 1 + c (m_i(theta) - m_i(theta at the start))    c = 4

    K = ceil(n_i / s) <= 64 elements at equal distances; the weights w alternate in sign, have
    magnitudes that rise from 1 to 2 (so that exchanged elements show), times 1 / norm: the weighted
    mean of K independent changes of size d is of size d whatever K is. A parameter that misses one
    step of size d moves the next one by c d of it. With the default rate of 0.01, P workers and
    values of 0.1 that is about c 0.01^2 / 0.1 / P = 4e-3 / P of the parameters, 100 times the
    tolerance of the comparison (1e-5, `summary.TOLERANCE`) for P = 4. The dependence is linear:
    what rounding changes stays a rounding.

    Example:
        >>> readings, parameter = Readings(), torch.zeros(1000)
        >>> readings.begin(0, parameter)
        >>> before = readings.factor(0, readings.read(0, parameter))
        >>> parameter[0] += 0.01  # every 16th element is read
        >>> before, round(readings.factor(0, readings.read(0, parameter)), 4)
        (1.0, 1.0033)
    """

    def __init__(self) -> None:
        self._readers: dict[int, tuple[int, Reader]] = {}
        self._started: dict[int, float] = {}

    def begin(self, number: int, parameter: torch.Tensor) -> None:
        """Parameter `number` [n] has its first values."""
        self._started[number] = float(self.read(number, parameter))

    def factor(self, number: int, reading: SupportsFloat) -> float:
        """What the gradient of a parameter that was read so is multiplied by."""
        return 1.0 + SENSITIVITY * (float(reading) - self._started[number])

    def read(self, number: int, parameter: torch.Tensor) -> SupportsFloat:
        """m_i of the values that parameter `number` [n] has now."""
        address, kept = parameter.data_ptr(), self._readers.get(number)
        if kept is None or kept[0] != address:  # a reader holds its memory: nobody else gets that
            kept = self._readers[number] = address, _reader(parameter.detach())
        return kept[1]()


Reader = Callable[[], SupportsFloat]


def _reader(parameter: torch.Tensor) -> Reader:
    """What computes m_i, in float64: the order of additions cannot be seen in a gradient."""
    view = parameter[:: max(1, -(-len(parameter) // NUM_READ))]
    weights = torch.linspace(1, 2, len(view), dtype=torch.float64, device="cpu")
    weights[1::2].neg_()
    weights /= weights.norm()
    if view.device.type == "cpu" and view.dtype != torch.bfloat16:
        # A third of what torch takes, for as few elements as these.
        return functools.partial(view.numpy().dot, weights.numpy())
    on_device = weights.to(view.device)
    return lambda: torch.dot(view.double(), on_device)
