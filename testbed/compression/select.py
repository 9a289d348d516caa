"""Which elements are the largest: a threshold from a sample, one scan in cache, a small exact rest.

Ties go to the lower index, so that all implementations agree. The plain twins stand in `plain`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

# Of a scan: elements whose magnitudes and marks stay in a cache between the three operations.
_CHUNK = {"cpu": 1 << 17, "cuda": 1 << 22}
_SMALL = 1 << 15  # below this the library's own selection is as fast
_STRIDE = 100  # of the sample: 1 %, as in DGC


def above(values: torch.Tensor, threshold: float) -> torch.Tensor:
    """Ascending indices (int64) of all |value| >= threshold; one pass over the memory.

    Example:
        >>> above(torch.tensor([1.0, -3.0, 2.0]), 2.0).tolist()
        [1, 2]
    """
    total, threshold = values.numel(), float(threshold)
    size = max(1, min(total, _CHUNK.get(values.device.type, 1 << 20)))
    scan = _scan_numpy if _fits_numpy(values) else _scan
    found = list(scan(values, threshold, size))
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=values.device)


def _scan(values: torch.Tensor, threshold: float, size: int) -> Iterator[torch.Tensor]:
    magnitudes = torch.empty(size, dtype=values.dtype, device=values.device)
    marks = torch.empty(size, dtype=torch.bool, device=values.device)
    for start in range(0, values.numel(), size):
        chunk = values[start : start + size]
        magnitude, mark = magnitudes[: chunk.numel()], marks[: chunk.numel()]
        torch.abs(chunk, out=magnitude)
        torch.ge(magnitude, threshold, out=mark)
        yield set_places(mark) + start


def _scan_numpy(values: torch.Tensor, threshold: float, size: int) -> Iterator[torch.Tensor]:
    """As `_scan`; NumPy compares eight times as fast on a CPU."""
    array = values.numpy()
    if threshold > float(np.finfo(array.dtype).max):  # nothing reaches it
        return
    magnitudes, marks = np.empty(size, array.dtype), np.empty(size, bool)
    for start in range(0, len(array), size):
        chunk = array[start : start + size]
        magnitude, mark = magnitudes[: len(chunk)], marks[: len(chunk)]
        np.abs(chunk, out=magnitude)
        np.greater_equal(magnitude, threshold, out=mark)
        yield torch.from_numpy(np.flatnonzero(mark) + start)


def largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Ascending indices (int64) of the `count` largest magnitudes, exactly; ties: lower index.

    A threshold that surely lies below the wanted one comes from a strided sample; what one scan
    finds above it (some 6 % too many at 1 %) is sorted out exactly. A sample that misled costs a
    full selection, never a wrong answer.

    Args:
        values: [n], finite.
        count: 0 .. n.

    Example:
        >>> largest(torch.tensor([1.0, -3.0, 3.0, 3.0]), 2).tolist()
        [1, 2]
    """
    total = values.numel()
    if count >= total:
        return torch.arange(total, device=values.device)
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=values.device)
    if total >= _SMALL and count * 4 <= total:
        sample = values[::_STRIDE].abs()
        wanted = count * sample.numel() / total
        rank = math.ceil(wanted + 3 * math.sqrt(wanted) + 3)
        if rank < sample.numel():
            candidates = above(values, _kth_largest(sample, rank))
            if candidates.numel() >= count:
                return candidates[_exactly(values[candidates].abs(), count)]
    return _exactly(values.abs(), count)


def sampled(values: torch.Tensor, count: int, offset: int) -> torch.Tensor:
    """Ascending indices of about `count` largest magnitudes, by a sampled threshold.

    The threshold is that of a 1 % strided sample. Between 0.8 and 1.3 times `count` is taken as
    it is; more is cut down to `count` exactly; less multiplies the threshold by 0.8 and looks
    again, at most 10 times.

    Args:
        values: [n], finite.
        count: wanted, 0 .. n.
        offset: where the sample starts, 0 .. 99; let it vary from step to step.

    Reference:
        Lin et al., 2018, ICLR (DGC). Departs: below 32 768 elements, or where ten corrections
        did not help, the selection is exact.

    Example:
        >>> sampled(torch.tensor([1.0, -3.0, 2.0]), 1, 0).tolist()
        [1]
    """
    total = values.numel()
    if total < _SMALL or count * 4 > total:
        return largest(values, count)
    sample = values[offset % _STRIDE :: _STRIDE].abs()
    threshold = _kth_largest(sample, max(1, round(count * sample.numel() / total)))
    for _ in range(11):
        if threshold <= 0:
            break
        found = above(values, threshold)
        if found.numel() > 1.3 * count:
            return found[_exactly(values[found].abs(), count)]
        if found.numel() >= 0.8 * count:
            return found
        threshold *= 0.8
    return largest(values, count)


def _exactly(magnitudes: torch.Tensor, count: int) -> torch.Tensor:
    """Ascending places of the `count` largest of [n] magnitudes, 1 <= count <= n."""
    if count == magnitudes.numel():
        return torch.arange(count, device=magnitudes.device)
    threshold = _kth_largest(magnitudes, count)
    places = set_places(magnitudes >= threshold)
    surplus = places.numel() - count
    if surplus == 0:
        return places
    equal = (magnitudes[places] == threshold).nonzero().view(-1)
    keep = torch.ones(places.numel(), dtype=torch.bool, device=magnitudes.device)
    keep[equal[equal.numel() - surplus :]] = False
    return places[keep]


def _kth_largest(magnitudes: torch.Tensor, count: int) -> float:
    """The `count`-th largest of [n], 1 <= count <= n."""
    if _fits_numpy(magnitudes):
        place = magnitudes.numel() - count
        return float(np.partition(magnitudes.numpy(), place)[place])
    return float(torch.topk(magnitudes, count, sorted=False).values.min())


def _fits_numpy(values: torch.Tensor) -> bool:
    """Whether NumPy can work on it."""
    return values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64)


def set_places(marks: torch.Tensor) -> torch.Tensor:
    """Ascending indices (int64) of the set marks; NumPy's is several times as fast where few are.

    Example:
        >>> set_places(torch.tensor([False, True])).tolist()
        [1]
    """
    if marks.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(marks.numpy()))
    return marks.nonzero().view(-1)
