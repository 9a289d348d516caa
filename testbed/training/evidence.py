"""What shows that ranks computed on the same: digests of what samples hold, sketches of buffers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Final

import torch

from testbed.training.sampling import RunningDigest

# Of each tensor in a batch: a few tens of microseconds a step, whatever a sample's size.
MOST_ELEMENTS: Final = 4096

Sketch = list[tuple[str, float, float]]
"""Name, 2-norm and projection of each buffer."""


def content_of(batch: Sequence[torch.Tensor]) -> bytes:
    """SHA-256 over shape, dtype and up to 4096 elements of each tensor, at equal distances.

    So a sample of more than a few elements cannot change unseen; some of its elements can.

    Example:
        >>> one, other = torch.zeros(8, 2000), torch.zeros(8, 2000)
        >>> other[5] = 1.0
        >>> content_of([one]) == content_of([one.clone()]), content_of([one]) == content_of([other])
        (True, False)
    """
    state = hashlib.sha256()
    for tensor in batch:
        flat = tensor.detach().reshape(-1)
        # Odd, so that in rows of an even length it is not always the same column.
        distance = -(-flat.numel() // MOST_ELEMENTS) | 1
        state.update(f"{tuple(tensor.shape)} {tensor.dtype};".encode())
        part = flat[::distance].cpu().contiguous()
        state.update(part.view(torch.uint8).numpy().data if part.numel() else b"")
    return state.digest()


class ContentDigest(RunningDigest):
    """Of all batches so far."""

    def see(self, batch: Sequence[torch.Tensor]) -> None:
        """Append a batch."""
        self.add(content_of(batch))


def sketch_of(model: torch.nn.Module) -> Sketch:
    """Two numbers of each buffer (batch statistics), which differ wherever two models' do.

        |b|,   sum over k of b_k cos(k)

    Example:
        >>> [(name, norm) for name, norm, _ in sketch_of(torch.nn.BatchNorm1d(4))]
        [('running_mean', 0.0), ('running_var', 2.0), ('num_batches_tracked', 0.0)]
    """
    found = []
    for name, buffer in model.named_buffers():
        flat = buffer.detach().reshape(-1).cpu().double()
        directions = torch.cos(torch.arange(len(flat), dtype=torch.float64))
        found.append((name, float(flat.norm()), float(flat @ directions)))
    return found


def sketch_error(ours: Sketch, theirs: Sketch) -> tuple[float, str]:
    """The largest difference over the buffer's norm, and whose; NaN counts as infinite.

    Example:
        >>> sketch_error([("a", 1.0, 0.5), ("b", 2.0, 1.0)], [("a", 1.0, 0.5), ("b", 4.0, 1.0)])
        (0.5, 'b')
    """
    if [name for name, *_ in ours] != [name for name, *_ in theirs]:
        return math.inf, "names of buffers"
    worst = (0.0, "")
    for (name, *mine), (_, *other) in zip(ours, theirs, strict=True):
        size = max(other[0], 1e-300)
        error = max(abs(a - b) / size for a, b in zip(mine, other, strict=True))
        worst = max(worst, (math.inf if math.isnan(error) else error, name))
    return worst
